"""New weights for an engine behind a channel, on a thread or in another process."""

import asyncio
import contextlib
from typing import Any

from rjax.engine.protocol import RunningMode
from rjax.engine_channel.channel import EngineChannel
from rjax.engine_channel.host_arrays import array_on_host
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.engine_channel.thread_channel import ThreadChannel
from rjax.engine_channel.weight_file import WeightFile
from rjax.errors import InvalidWeightsError
from rjax.models import CheckpointError
from rjax.models.adopting.mapping import NameMap, WeightMapping, flat_items
from rjax.models.adopting.staged import staged_tensors, tensors_on_host

_POLL_SECONDS = 0.01  # between two looks at whether running requests have finished


class WeightClient:
    """The methods of `WeightEngine` for asyncio.

    To an engine in another process, arrays go through shared memory: as they are with a built-in
    mapping, otherwise as the tensors that the mapping finds in them.

    Args:
        channel: the channel to the engine.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._version = 0
        self._names: NameMap | None = None

    @property
    def version(self) -> int:
        """Number of updates of the weights, as far as this client knows."""
        channel = self._channel
        if isinstance(channel, ThreadChannel):
            return channel.engine.weights_version
        return self._version

    async def start(
        self, *, partial: bool = False, mapping: str | WeightMapping | None = None
    ) -> None:
        """See `WeightEngine.start_weight_update`."""
        if isinstance(self._channel, ProcessChannel):
            try:
                self._names = NameMap(None if isinstance(mapping, str) else mapping)
            except CheckpointError as error:
                raise InvalidWeightsError(str(error)) from error
            mapping = mapping if isinstance(mapping, str) else None
        await self._call("start_weight_update", partial=partial, mapping=mapping)

    async def add(self, items: Any) -> None:
        """See `WeightEngine.add_weights`."""
        try:
            items = list(flat_items(items))
            if self._names is None:
                await self._call("add_weights", items)
                return
            on_host = [(name, array_on_host(array)) for name, array in items]
            found = tensors_on_host(staged_tensors(on_host, self._names))
        except CheckpointError as error:
            await self.cancel()
            raise InvalidWeightsError(str(error)) from error
        except BaseException:
            await self.cancel()
            raise
        with contextlib.closing(await asyncio.to_thread(WeightFile, found)) as file:
            await self._call("add_weights", file.path)

    async def finish(self, mode: RunningMode = "wait") -> int:
        """See `WeightEngine.finish_weight_update`. If it is cancelled, so is the update."""
        try:
            while (version := await self._call("try_finish_weight_update", mode)) is None:
                await asyncio.sleep(_POLL_SECONDS)
        except asyncio.CancelledError:
            await asyncio.shield(self.cancel())
            raise
        self._version = version
        return version

    async def cancel(self) -> None:
        """See `WeightEngine.cancel_weight_update`."""
        self._names = None
        await self._call("cancel_weight_update")

    async def update(
        self,
        weights: Any,
        *,
        mode: RunningMode = "wait",
        mapping: str | WeightMapping | None = None,
        partial: bool = False,
    ) -> int:
        """See `rjax.LLM.update_weights`."""
        await self.start(partial=partial, mapping=mapping)
        try:
            await self.add(weights)
            return await self.finish(mode)
        finally:
            await asyncio.shield(self.cancel())

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return await self._channel.call_utility(name, *args, **kwargs)
