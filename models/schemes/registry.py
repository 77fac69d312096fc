"""From ``quantization_config`` of a checkpoint to its weight scheme."""

from collections.abc import Callable
from typing import Any

from models.errors import CheckpointError
from models.schemes.scheme import WeightScheme
from models.schemes.unquantised import UNQUANTISED

type SchemeReader = Callable[[dict[str, Any]], WeightScheme]

_READERS: dict[str, SchemeReader] = {}


def register_scheme(method: str, read: SchemeReader) -> None:
    """Have checkpoints whose ``quantization_config`` has this ``quant_method`` read.

    ``read`` turns that object into the scheme, and raises CheckpointError for fields that it
    cannot honour. Call this once, when the module that holds the scheme is imported.

    Raises:
        ValueError: another reader has the name.
    """
    if _READERS.setdefault(method, read) is not read:
        raise ValueError(f"the weight scheme {method!r} is registered already")


def read_scheme(quantization: Any) -> WeightScheme:
    """The scheme of a checkpoint's ``quantization_config``; None is a checkpoint without one.

    Raises:
        CheckpointError: no scheme of that name is registered, or it refuses the fields.
    """
    if quantization is None:
        return UNQUANTISED
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        known = ", ".join(sorted(_READERS)) or "none yet"
        raise CheckpointError(
            f"config.json: quantization_config has the quant_method {method!r}, which is not "
            f"supported (supported: {known}); use the unquantised checkpoint"
        )
    return read(quantization)
