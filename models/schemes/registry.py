"""Registry of weight schemes by the ``quant_method`` of ``quantization_config``."""

from collections.abc import Callable
from typing import Any

from rjax.models.errors import CheckpointError
from rjax.models.schemes.scheme import WeightScheme
from rjax.models.schemes.unquantised import UNQUANTISED

type SchemeReader = Callable[[dict[str, Any]], WeightScheme]

_READERS: dict[str, SchemeReader] = {}


def register_scheme(method: str, read: SchemeReader) -> None:
    """Register a weight scheme for checkpoints with this ``quant_method``.

    ``read`` converts the ``quantization_config`` object to the scheme, and raises CheckpointError
    for fields that it does not support. Call this once, when the module of the scheme is imported.

    Raises:
        ValueError: another reader has the name.
    """
    if _READERS.setdefault(method, read) is not read:
        raise ValueError(f"the weight scheme {method!r} is registered already")


def scheme_names() -> list[str]:
    """The registered values of ``quant_method``, sorted."""
    return sorted(_READERS)


def read_scheme(quantization: Any) -> WeightScheme:
    """The scheme of a checkpoint's ``quantization_config``; None if the checkpoint has none.

    Raises:
        CheckpointError: no scheme of that name is registered, or it refuses the fields.
    """
    if quantization is None:
        return UNQUANTISED
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        known = ", ".join(scheme_names()) or "none yet"
        raise CheckpointError(
            f"config.json: quantization_config has the quant_method {method!r}, which is not "
            f"supported (supported: {known}); use the unquantised checkpoint"
        )
    return read(quantization)
