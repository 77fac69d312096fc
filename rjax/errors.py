"""The exceptions a caller can meet, each a subclass of RjaxError."""


class RjaxError(Exception):
    """Base of every error rjax raises on purpose."""


class InvalidRequestError(RjaxError, ValueError):
    """A prompt or a sampling parameter is not acceptable; the message says what would be."""


class InvalidConfigError(RjaxError, ValueError):
    """An engine setting is unknown, out of range or contradicts another."""


class OutOfMemoryError(RjaxError):
    """The model, or the KV pool it needs, does not fit; the message says what would."""


class OverloadedError(RjaxError):
    """The queue is full or the server is shutting down; the same request may succeed later.

    Args:
        message: for whoever asked.
        reason: "draining", or the name of the limit; for statistics.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineDeadError(RjaxError):
    """The engine stopped on an error of its own; it has to be started anew."""
