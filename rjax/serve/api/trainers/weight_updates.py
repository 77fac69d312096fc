"""WeightUpdates: one update of the weights at a time, from a trainer on the same machine."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from rjax.engine.protocol import RunningMode
from rjax.errors import InvalidRequestError
from rjax.serve.api.trainers.weight_link import TensorSpec, WeightLink
from rjax.serve.http.threads import run_on_new_thread
from rjax.serve.protocol.errors import ApiError

_CONNECT_SECONDS = 30.0


@runtime_checkable
class UpdatedEngine(Protocol):
    """What an update calls on an engine; see `rjax.api.weight_client.WeightClient`."""

    async def start(self, *, partial: bool = False, mapping: str | None = None) -> None: ...

    async def add(self, items: Iterable[tuple[str, np.ndarray]]) -> None: ...

    async def finish(self, mode: RunningMode = "wait") -> int: ...

    async def cancel(self) -> None: ...


class WeightUpdates:
    """The updates of a server's weights, each a transaction: `start`, then any number of `receive`,
    then `finish`. Until `finish` the engine serves the old weights.

    An error ends the update and the connection to the trainer, and the old weights stay. A `start`
    cancels an update whose trainer did not finish it.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: UpdatedEngine) -> None:
        self._engine = engine
        self._link: WeightLink | None = None
        self._is_open = False
        self._lock = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether an update has started and not ended."""
        return self._is_open

    def check_connected(self) -> WeightLink:
        """The connection to the trainer.

        Raises:
            ApiError: 409, no trainer is connected.
        """
        if self._link is None:
            raise ApiError(409, "no trainer is connected; call /init_weight_transfer_engine first")
        return self._link

    async def connect(self, port: int) -> None:
        """Connect to the trainer of this port, in place of an earlier trainer.

        Raises:
            InvalidRequestError: see `WeightLink.connect`.
        """
        self._disconnect()  # a call that waits for the earlier trainer ends
        async with self._lock:
            await self._cancel()
            self._disconnect()
            self._link = await run_on_new_thread(
                lambda: WeightLink.connect(port, _CONNECT_SECONDS), "rjax-weight-link"
            )

    async def start(self, *, partial: bool = False, mapping: str | None = None) -> None:
        """Start an update."""
        async with self._lock:
            await self._cancel()
            await self._engine.start(partial=partial, mapping=mapping)
            self._is_open = True

    async def receive(self, expected: Sequence[TensorSpec]) -> None:
        """Receive these tensors, in buckets, and hand them to the engine.

        Raises:
            ApiError: 409, no trainer is connected, or no update has started.
            InvalidRequestError: the trainer sent something else, or the engine refuses a tensor.
        """
        async with self._lock, self._or_cancel() as link:
            if not self._is_open:
                raise ApiError(409, "no update has started; call /start_weight_update first")
            left = list(expected)
            while left:
                bucket = await run_on_new_thread(lambda: link.receive(left), "rjax-weight-link")
                await self._engine.add(bucket)
                del left[: len(bucket)]
                link.answer()

    async def finish(self, mode: RunningMode) -> int:
        """Use the new weights.

        Args:
            mode: what becomes of running requests, as in `rjax.LLM.update_weights`.

        Returns:
            The version of the new weights.

        Raises:
            ApiError: 409, no update has started.
            ValueError: the engine refuses the weights.
        """
        async with self._lock:
            if not self._is_open:
                raise ApiError(409, "no update has started; call /start_weight_update first")
            self._is_open = False  # an update that fails has ended too
            return await self._engine.finish(mode)

    async def cancel(self) -> None:
        """End an update without using its weights, and the connection to a trainer that sends
        them."""
        if self._lock.locked():
            self._disconnect()
        async with self._lock:
            await self._cancel()

    async def close(self) -> None:
        """Cancel an update, and close the connection to the trainer."""
        self._disconnect()
        async with self._lock:
            await self._cancel()

    @contextlib.asynccontextmanager
    async def _or_cancel(self) -> AsyncGenerator[WeightLink]:
        link = self.check_connected()
        try:
            yield link
        except BaseException as error:
            # A stale bucket could wait in the connection; the trainer makes a new one.
            known = isinstance(error, ApiError | ValueError)
            link.answer(str(error) if known else "the update was interrupted")
            self._disconnect()
            await self._cancel()
            raise

    async def _cancel(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._engine.cancel()

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None


def specs_of(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[TensorSpec]:
    """The tensors that a trainer announces.

    Raises:
        InvalidRequestError: the lists differ in length, or one tensor is not valid.
    """
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequestError(
            f"update_info has {len(names)} names, {len(dtypes)} dtype_names and {len(shapes)} "
            "shapes; give one of each for a tensor"
        )
    return [TensorSpec.read(*entry) for entry in zip(names, dtypes, shapes, strict=True)]
