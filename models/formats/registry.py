"""Registry of weight formats by the ``quant_method`` of ``quantization_config``."""

from collections.abc import Callable
from typing import Any

from rjax.models.errors import CheckpointError
from rjax.models.formats.awq import AWQ_FIELDS, read_awq
from rjax.models.formats.compressed_tensors_config import (
    COMPRESSED_TENSORS_FIELDS,
    read_compressed_tensors,
    unknown_group_fields,
)
from rjax.models.formats.fp8 import FP8_FIELDS, read_fp8
from rjax.models.formats.gptq import GPTQ_FIELDS, read_gptq
from rjax.models.formats.mxfp4 import MXFP4_FIELDS, read_mxfp4
from rjax.models.formats.weight_format import WeightFormat

type FormatReader = Callable[[dict[str, Any]], WeightFormat]

_FIELDS: dict[str, frozenset[str]] = {
    "awq": AWQ_FIELDS,
    "compressed-tensors": COMPRESSED_TENSORS_FIELDS,
    "fp8": FP8_FIELDS,
    "gptq": GPTQ_FIELDS,
    "mxfp4": MXFP4_FIELDS,
}
_READERS: dict[str, FormatReader] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}


def register_format(method: str, read: FormatReader) -> None:
    """Register a weight format for checkpoints with this ``quant_method``.

    ``read`` converts the ``quantization_config`` object to the format, and raises CheckpointError
    for fields that it does not support. Call this once, when the module of the format is imported.

    Raises:
        ValueError: another reader has the name.
    """
    if _READERS.setdefault(method, read) is not read:
        raise ValueError(f"the weight format {method!r} is registered already")


def format_names() -> list[str]:
    """The registered values of ``quant_method``, sorted."""
    return sorted(_READERS)


def read_format(quantization: Any) -> WeightFormat:
    """The format of a checkpoint's ``quantization_config``.

    Raises:
        CheckpointError: no format of that name is registered, or it refuses the fields.
    """
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        raise CheckpointError(
            f"config.json: quantization_config has the quant_method {method!r}, which is not "
            f"supported (supported: {', '.join(format_names())}); use the unquantised checkpoint"
        )
    return read(quantization)


def unknown_quantization_fields(quantization: dict[str, Any]) -> list[str]:
    """Names of the fields that the format does not know, sorted; it must take the config.

    A format from `register_format` checks its fields itself.
    """
    method = quantization["quant_method"]
    unknown = set(quantization.keys() - _FIELDS.get(method, quantization.keys()))
    if method == "compressed-tensors":
        unknown |= unknown_group_fields(quantization)
    return sorted(f"quantization_config.{name}" for name in unknown)
