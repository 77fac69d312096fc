"""The methods of `rjax.AsyncLLM` that give it new weights."""

import abc
from typing import Any

from rjax.api.async_engine import AsyncLLMEngine
from rjax.engine.protocol import RunningMode
from rjax.models.adopting.mapping import WeightMapping


class UpdatesWeightsAsync(abc.ABC):
    """Gives the engine of a subclass new weights, while requests run."""

    _served: AsyncLLMEngine

    @abc.abstractmethod
    async def _ensure_started(self) -> None:
        """Start the engine's thread; raises EngineClosedError if it is closed."""

    @property
    def weights_version(self) -> int:
        """Number of updates of the weights so far."""
        return self._served.weights.version

    async def update_weights(
        self,
        weights: Any,
        *,
        mode: RunningMode = "wait",
        mapping: str | WeightMapping | None = None,
        partial: bool = False,
    ) -> int:
        """Replace the weights by those of a trainer, as `LLM.update_weights`. With the mode "wait"
        new requests are accepted, and start once the weights are replaced."""
        await self._ensure_started()
        return await self._served.weights.update(
            weights, mode=mode, mapping=mapping, partial=partial
        )

    async def start_weight_update(
        self, *, partial: bool = False, mapping: str | WeightMapping | None = None
    ) -> None:
        """Begin an update that arrives in parts, as `LLM.start_weight_update`."""
        await self._ensure_started()
        await self._served.weights.start(partial=partial, mapping=mapping)

    async def add_weights(self, items: Any) -> None:
        """Add a part of the weights, as `LLM.add_weights`. With an engine in a process of its own
        the arrays are copied, through shared memory."""
        await self._ensure_started()
        await self._served.weights.add(items)

    async def finish_weight_update(self, mode: RunningMode = "wait") -> int:
        """Check all parts and replace the weights, as `LLM.finish_weight_update`."""
        await self._ensure_started()
        return await self._served.weights.finish(mode)

    async def cancel_weight_update(self) -> None:
        """Drop an update; nothing happens if none is under way."""
        await self._ensure_started()
        await self._served.weights.cancel()
