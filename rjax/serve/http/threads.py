"""Threads for work beside the event loop."""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class WorkThreads:
    """Runs Python functions off the event loop. A running function cannot be cancelled, so it must
    be short; unbounded work on a client's text runs in `rjax.serve.workers`.

    Args:
        count: number of threads.
    """

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rjax-serve")

    async def run[T](self, function: Callable[..., T], *arguments: object) -> T:
        """Run ``function(*arguments)`` on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments))

    def close(self) -> None:
        """Refuse further work and cancel queued work."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def run_on_new_thread[T](function: Callable[[], T], name: str) -> T:
    """Run a function on a thread of its own. Cancelling does not wait for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name).start()
    return await done
