"""Errors as plain values: the name of a known class, and the message."""

from typing import Any

from rjax import errors
from rjax.models import CheckpointError

_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        errors.ContextLengthError,
        errors.EngineClosedError,
        errors.EngineDeadError,
        errors.EnginePausedError,
        errors.EngineSleepingError,
        errors.GrammarFailedError,
        errors.InvalidConfigError,
        errors.InvalidRequestError,
        errors.InvalidWeightsError,
        errors.OutOfMemoryError,
        OSError,
    )
}
"""The exceptions whose message says all, which commands show as one line, by name."""


class EngineProcessError(RuntimeError):
    """The engine process raised an error that only its log describes in full."""


def says_all(error: BaseException) -> bool:
    """Whether the message of an error needs no traceback beside it."""
    return isinstance(error, errors.RjaxError | CheckpointError | OSError)


def pack_error(error: BaseException) -> list[str]:
    """The error's class and message; its traceback stays behind."""
    if isinstance(error, errors.OverloadedError):
        return ["OverloadedError", str(error), error.reason]
    for kind in type(error).__mro__:
        if kind.__name__ in _KNOWN:
            return [kind.__name__, str(error)]
    return ["", f"{type(error).__name__}: {error}"]


def unpack_error(packed: Any) -> Exception:
    """The error that `pack_error` packed; an `EngineProcessError` if its class is unknown."""
    name, message, *reason = packed
    if reason:
        return errors.OverloadedError(message, reason[0])
    return _KNOWN.get(name, EngineProcessError)(message)
