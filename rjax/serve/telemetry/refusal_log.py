"""Logs why requests were refused."""

import logging
import time

from starlette.types import Scope

from rjax.serve.protocol.errors import ApiError

_log = logging.getLogger("rjax.serve")
_MAX_LINES = 20  # in each window, so that clients cannot fill the log
_WINDOW_SECONDS = 10.0
_MAX_MESSAGE = 200  # characters; the message may quote the client's input
_MAX_PATH = 80
_CLIENT_LEFT = 499


class RefusalLog:
    """Logs a line for each request that is answered with a status from 400 to 499.

    At most 20 lines are written in ten seconds; the first line after them has the number of those
    left out. Characters that are not printable are escaped.
    """

    def __init__(self) -> None:
        self._window = 0.0
        self._lines = 0
        self._left_out = 0

    def __call__(self, scope: Scope, error: ApiError) -> None:
        """Log the refusal of a request."""
        if not 400 <= error.status < 500 or error.status == _CLIENT_LEFT:
            return
        now = time.monotonic()
        if now - self._window >= _WINDOW_SECONDS:
            self._window, self._lines = now, 0
        if self._lines == _MAX_LINES:
            self._left_out += 1
            return
        self._lines += 1
        more = f" ({self._left_out} refusals before it are not logged)" if self._left_out else ""
        self._left_out = 0
        method, path = scope.get("method", "-"), printable(scope["path"], _MAX_PATH)
        reason = printable(error.message, _MAX_MESSAGE)
        _log.info("%d %s %s: %s%s", error.status, method, path, reason, more)


def printable(text: str, most: int) -> str:
    """The text on one line, cut after ``most`` characters."""
    short = text if len(text) <= most else text[:most] + "..."
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in short
    )
