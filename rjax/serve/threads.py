"""A thread pool for work of bounded duration."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class WorkThreads:
    """Runs Python functions off the event loop. A running function cannot be cancelled, so it must
    be short; unbounded work on a client's text runs in `rjax.serve.workers`.

    Args:
        count: threads.
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
