"""Objects that own memory until they are closed, and calls that exclude one another."""

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate

from rjax.errors import EngineClosedError


class Closable:
    """Gives its memory back with `close`, or at the end of a ``with`` block.

    A subclass says in `_free` what that is, and calls `_check_open` before it does anything else.
    """

    _closed = False

    def close(self) -> None:
        """End what still runs and free the memory; from then on every use raises
        EngineClosedError. Closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._free()

    def _free(self) -> None:
        raise NotImplementedError

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"this {type(self).__name__} is closed; make a new one")

    def __enter__[C: "Closable"](self: C) -> C:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class OneCaller(Closable):
    """A `Closable` whose `one_at_a_time` methods exclude one another, `close` among them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def close(self) -> None:
        """As `Closable.close`; waits for the calls of other threads."""
        with self._lock:
            super().close()


def one_at_a_time[**P, R](
    method: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], R]:
    """A method of a `OneCaller` that waits while another thread is in one.

    Raises:
        EngineClosedError: it is closed.
    """

    @functools.wraps(method)
    def alone(self: Any, *given: P.args, **named: P.kwargs) -> R:
        with self._lock:
            self._check_open()
            return method(self, *given, **named)

    return alone
