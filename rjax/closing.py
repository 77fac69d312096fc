"""Base classes of objects with ``close``: releasing memory, and one caller at a time."""

import abc
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Concatenate

from rjax.errors import EngineClosedError


class Closable(abc.ABC):
    """Frees its memory with `close`, or at the end of a ``with`` block.

    A subclass frees what it owns in `_free`, and calls `_check_open` first in every public method.
    """

    _closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Abort running requests and free the memory. Any later use raises EngineClosedError;
        closing twice does nothing."""
        if not self._closed:
            self._closed = True
            self._free()

    @abc.abstractmethod
    def _free(self) -> None:
        """Abort running requests and free the memory; called once."""

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


class SynchronizedClosable(Closable):
    """A `Closable` with a lock: one thread at a time runs `close` or a `synchronized` method."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calls = 0

    def close(self) -> None:
        """Close as `Closable.close` does, after the calls of other threads have returned."""
        with self._lock:
            super().close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for the block, so that no other thread is in a call.

        Raises:
            EngineClosedError: it is closed.
        """
        with self._lock:
            self._check_open()
            self._calls += 1
            try:
                yield
            finally:
                self._calls -= 1

    def if_idle(self, function: Callable[[], None]) -> bool:
        """Call a function if no thread, including this one, is in a call. Return whether it was
        called. Never blocks, so that finalizers may use it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            idle = not self._calls and not self._closed
            if idle:
                function()
            return idle
        finally:
            self._lock.release()


def synchronized[S: SynchronizedClosable, **P, R](
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Decorate a method of a `SynchronizedClosable` to wait while another thread is in a call.

    Raises:
        EngineClosedError: it is closed.
    """

    @functools.wraps(method)
    def locked(self: S, *given: P.args, **named: P.kwargs) -> R:
        with self.locked():
            return method(self, *given, **named)

    return locked
