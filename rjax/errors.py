"""The exceptions a caller can meet, each a subclass of RjaxError."""

import contextlib
import difflib
from collections.abc import Iterable
from types import FrameType


def near_miss(given: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or else all of them."""
    known = list(known)
    if near := difflib.get_close_matches(str(given), known, n=1):
        return f"the nearest is {near[0]!r}"
    return f"known are {', '.join(sorted(known))}"


class RjaxError(Exception):
    """Base of every error rjax raises on purpose."""


class InvalidRequestError(RjaxError, ValueError):
    """A prompt or a sampling parameter is not acceptable; the message says what would be."""


class ContextLengthError(InvalidRequestError):
    """A prompt leaves no room for an output token within ``max_model_len``.

    The messages begin as those of OpenAI's API, because clients that then ask another model look
    for these words.
    """

    @classmethod
    def of_tokens(cls, count: int, max_model_len: int, room: int = 1) -> "ContextLengthError":
        """The error of a prompt of ``count`` tokens; ``room`` is 0 where none is generated."""
        if not room:
            return cls(
                f"This model's maximum context length is {max_model_len} tokens, and there are "
                f"{count} to score: shorten them or raise max_model_len"
            )
        return cls(
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
            f"{count} tokens; at most {max_model_len - 1} fit, with one for the output: shorten it "
            "or raise max_model_len"
        )

    @classmethod
    def of_characters(cls, what: str, count: int, max_model_len: int) -> "ContextLengthError":
        """The error of a text, ``what``, that is too long for any ``max_model_len`` tokens."""
        return cls(
            f"This model's maximum context length is {max_model_len} tokens, which cannot hold the "
            f"{count} characters of {what}: shorten it or raise max_model_len"
        )


class InvalidConfigError(RjaxError, ValueError):
    """An engine setting is unknown, out of range or contradicts another."""


class InvalidWeightsError(RjaxError, ValueError):
    """New weights do not fit the model, or the update is not one; the old weights stay in use."""


class OutOfMemoryError(RjaxError):
    """The model, or the KV pool it needs, does not fit; the message says what would."""


class OverloadedError(RjaxError):
    """The queue is full or the server is shutting down; the same request may succeed later.

    Args:
        message: the message for the sender of the request.
        reason: "draining", or the name of the limit; for statistics.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrammarFailedError(RjaxError, ValueError):
    """The grammar of a sample cannot go on, or takes too long; the message may be shown."""


class EngineSleepingError(RjaxError):
    """The engine sleeps: its memory is given back until ``wake_up``."""


class EnginePausedError(RjaxError):
    """The engine is paused, or waits to update its weights; the call would wait without end."""


class EngineDeadError(RjaxError):
    """The engine stopped on an error of its own; it has to be started anew."""


class EngineClosedError(RjaxError):
    """The object was closed and its memory given back; make a new one."""


def without_frames[E: BaseException](error: E) -> E:
    """An error that is to be kept, without its frames: a kept frame would keep an engine's memory.

    It and its causes lose their tracebacks, and the frames that have ended lose what they refer
    to. Call it where the error was caught.
    """
    part: BaseException | None = error
    while part is not None:
        trace, part.__traceback__ = part.__traceback__, None
        while trace is not None:
            _clear_ended(trace.tb_frame)
            trace = trace.tb_next
        part = part.__cause__ or part.__context__
    return error


def _clear_ended(frame: FrameType | None) -> None:
    """Clear a frame and its callers, up to those that still run."""
    with contextlib.suppress(RuntimeError):
        while frame is not None:
            frame.clear()
            frame = frame.f_back
