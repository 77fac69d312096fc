"""Keeps errors that repeat from filling the log: clients can cause them as often as they ask."""

import copy
import logging
import threading
import time

from rjax.serve.telemetry.refusal_log import printable

_WINDOW_SECONDS = 60.0
_MAX_LINES = 20  # of a kind in a window
_MAX_KINDS = 100  # that are told apart
_MAX_MESSAGE = 200  # characters of an exception


class RepeatedErrors(logging.Filter):
    """Shows the traceback of the first error of a kind in a minute; later ones are one line each.

    A kind is a message of the source and a type of exception. After 20 lines of a kind the rest of
    the minute is left out; the next line has the number of those. Records without an exception
    pass. Made for handlers: other handlers get the record as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, object, type], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        """The record, one without traceback, or False."""
        if not record.exc_info or record.exc_info[1] is None:
            return True
        error = record.exc_info[1]
        with self._lock:
            kind = self._kind((record.name, record.msg, type(error)))
            kind.lines += 1
            if kind.lines > _MAX_LINES:
                kind.left_out += 1
                return False
            first = kind.lines == 1
            left_out, kind.left_out = kind.left_out, 0
        if first and not left_out:
            return True
        shown = copy.copy(record)
        shown.msg, shown.args = record.getMessage(), None
        if left_out:
            shown.msg += f" ({left_out} such errors before it are not logged)"
        if not first:
            shown.exc_info = shown.exc_text = None
            shown.msg += f": {type(error).__name__}: {printable(str(error), _MAX_MESSAGE)}"
        return shown

    def _kind(self, name: tuple[str, object, type]) -> "_Kind":
        now = time.monotonic()
        kind = self._kinds.pop(name, None) or _Kind(now)
        if now - kind.begun >= _WINDOW_SECONDS:
            kind.begun, kind.lines = now, 0
        self._kinds[name] = kind  # the last one
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return kind


class _Kind:
    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.lines = self.left_out = 0
