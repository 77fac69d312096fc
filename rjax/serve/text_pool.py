"""Threads for work on a client's text: templates, tokenising, grammars."""

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rjax.serve.errors import ApiError


class TextPool:
    """Runs text work off the event loop, a few at a time, none longer than its client waits.

    Args:
        workers: threads.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="rjax-text")

    async def run[T](
        self, function: Callable[..., T], *arguments: object, seconds: float, task: str
    ) -> T:
        """``function(*arguments)`` on a thread.

        Raises:
            ApiError: 400, it took longer than ``seconds``, waiting for a thread included.
        """
        loop = asyncio.get_running_loop()
        job = loop.run_in_executor(self._threads, functools.partial(function, *arguments))
        try:
            async with asyncio.timeout(seconds):
                return await job
        except TimeoutError as error:
            raise ApiError(
                400, f"{task} takes longer than {seconds:g} seconds; ask for less", code="too_slow"
            ) from error

    def close(self) -> None:
        """Take no more work."""
        self._threads.shutdown(wait=False, cancel_futures=True)
