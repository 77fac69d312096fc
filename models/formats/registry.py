"""Registry of weight formats by the ``quant_method`` of ``quantization_config``."""

from collections.abc import Callable
from typing import Any

from rjax.models.errors import CheckpointError
from rjax.models.formats.weight_format import WeightFormat

type FormatReader = Callable[[dict[str, Any]], WeightFormat]

type UnknownFields = Callable[[dict[str, Any]], set[str]]

_READERS: dict[str, FormatReader] = {}
_UNKNOWN_FIELDS: dict[str, UnknownFields] = {}


def register_format(
    method: str, read: FormatReader, unknown_fields: UnknownFields | None = None
) -> None:
    """Register a weight format for checkpoints with this ``quant_method``.

    Call this once, when the module of the format is imported.

    Args:
        method: the ``quant_method``.
        read: converts the ``quantization_config`` object to the format, and raises CheckpointError
            for fields that it does not support.
        unknown_fields: the names of the fields that the format does not know, of an object that it
            takes; None for a format that refuses them.

    Raises:
        ValueError: another reader has the name.
    """
    if _READERS.setdefault(method, read) is not read:
        raise ValueError(f"the weight format {method!r} is registered already")
    if unknown_fields is not None:
        _UNKNOWN_FIELDS[method] = unknown_fields


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
    """Paths of the fields that the format does not know, sorted; it must take the config."""
    unknown_fields = _UNKNOWN_FIELDS.get(quantization["quant_method"])
    unknown = set() if unknown_fields is None else unknown_fields(quantization)
    return sorted(f"quantization_config.{name}" for name in unknown)
