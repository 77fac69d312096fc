"""Registry of weight formats by the ``quant_method`` of ``quantization_config``."""

from collections.abc import Callable
from typing import Any

from rjax.models.errors import CheckpointError
from rjax.models.formats.awq import read_awq
from rjax.models.formats.compressed_tensors_config import read_compressed_tensors
from rjax.models.formats.fp8 import read_fp8
from rjax.models.formats.gptq import read_gptq
from rjax.models.formats.mxfp4 import read_mxfp4
from rjax.models.formats.weight_format import WeightFormat

type FormatReader = Callable[[dict[str, Any]], WeightFormat]

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
