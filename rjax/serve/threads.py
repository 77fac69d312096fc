"""Threads for work whose amount is bounded before it begins."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class WorkThreads:
    """Runs Python work off the event loop. Nothing here can be ended, so nothing here may be long:
    a client's text goes to `rjax.serve.workers` instead.

    Args:
        count: threads.
    """

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="rjax-serve")

    async def run[T](self, function: Callable[..., T], *arguments: object) -> T:
        """``function(*arguments)`` on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *arguments))

    def close(self) -> None:
        """Take no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
