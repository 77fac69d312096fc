"""Pause, sleep and wake-up of an engine behind a channel."""

import asyncio
from collections.abc import Collection

from rjax.engine_channel.channel import EngineChannel

_POLL_SECONDS = 0.02


class AsyncLifecycle:
    """Pauses an engine, puts it to sleep and wakes it up, while an event loop runs.

    See `rjax.engine.protocol.Engine` for the methods, and for what the engine refuses; these return
    when the engine has done it.

    Args:
        channel: channel to the engine.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel

    async def pause(self, mode: str = "abort") -> None:
        """Pause, and wait until no step is under way and all outputs are on their way.

        If the caller is cancelled meanwhile, the engine stays paused.
        """
        await self._channel.call_utility("pause", mode)
        await self._drained()

    async def resume(self) -> None:
        """End a pause."""
        await self._channel.call_utility("resume")

    async def is_paused(self) -> bool:
        """Whether the engine is paused, or sleeps."""
        return await self._channel.call_utility("is_paused")

    async def sleep(self, level: int | str = 1, mode: str = "abort") -> None:
        """Pause, and give back the memory of the KV pool and of the weights."""
        await self._channel.call_utility("check_sleep_level", level)
        await self._channel.call_utility("pause", mode, for_sleep=True)
        await self._drained()
        await self._channel.call_utility("sleep", level)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take the memory again, and resume once all is there."""
        given = tags if tags is None or isinstance(tags, str) else list(tags)
        await self._channel.call_utility("wake_up", given)

    async def is_sleeping(self) -> bool:
        """Whether some memory is given back."""
        return await self._channel.call_utility("is_sleeping")

    async def _drained(self) -> None:
        while await self._channel.call_utility("is_draining"):
            await asyncio.sleep(_POLL_SECONDS)
