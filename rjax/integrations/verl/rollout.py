"""RjaxRollout: gives the weights of verl's trainer to the engine beside it."""

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout

from rjax.integrations.verl.tensors import SentTensor, sent

_BUCKET_BYTES = 256 * 2**20


def server_name(replica_rank: int, prefix: str = "") -> str:
    """Name of the Ray actor of a replica's server."""
    return f"rjax_server_{prefix}{replica_rank}_0"


class RjaxRollout(BaseRollout):
    """A client of an `rjax.integrations.verl.server.RjaxServer` in a worker of verl.

    Of the workers of a replica the first one asks the server; the others only take part in the
    iteration over the weights, in which a trainer gathers its shards.

    Args:
        config: verl's configuration of rollouts.
        model_config: verl's configuration of the model.
        device_mesh: verl's, unused.
        replica_rank: number of the replica; -1 finds it by the worker's rank.
    """

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        own, rank = self.config, int(os.environ["RANK"])
        size = (
            own.tensor_model_parallel_size
            * own.data_parallel_size
            * own.pipeline_model_parallel_size
        )
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._found: Any = None

    @property
    def _server(self) -> Any:
        # The server is started after the workers.
        if self._found is None:
            self._found = ray.get_actor(server_name(self.replica_rank))
        return self._found

    async def resume(self, tags: list[str]) -> None:
        """Take back device memory for the weights, the KV pool, or both.

        Args:
            tags: "weights" and "kv_cache".
        """
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Give back the device memory of the weights and of the KV pool."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Use the trainer's weights, all of them or none.

        They travel through Ray's object store, which holds a copy until the update is finished.

        Args:
            weights: names and tensors of a checkpoint, in an order of verl's. verl may use the
                memory of a tensor for the next one.
            wire_format: "named_tensors".
            global_steps: the trainer's step, which later outputs have in ``extra_fields``.
            kwargs: of verl for other engines; adapters are refused.

        Raises:
            NotImplementedError: another format, or the weights of an adapter.
            InvalidWeightsError: see `rjax.LLM.update_weights`; the old weights stay in use.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"wire_format is {wire_format!r}; set checkpoint_engine.backend to one that sends "
                "'named_tensors', whole tensors"
            )
        if kwargs.get("peft_config") is not None and kwargs.get("base_sync_done", False):
            raise NotImplementedError(
                "the trainer sends an adapter, which the engine does not have; set "
                "model.lora.merge so that it sends merged weights"
            )
        if not self.is_leader_rank:
            async for _ in _async_items(weights):
                pass
            return
        server = self._server
        await server.start_weight_update.remote()
        try:
            bucket: list[SentTensor] = []
            size = 0
            async for name, tensor in _async_items(weights):
                bucket.append(sent(name, tensor))
                size += bucket[-1].data.nbytes
                if size >= _BUCKET_BYTES:
                    await server.add_weights.remote(bucket)
                    bucket, size = [], 0
            await server.add_weights.remote(bucket)
            await server.finish_weight_update.remote(global_steps)
        except BaseException:
            await server.cancel_weight_update.remote()
            raise


async def _async_items(
    weights: Iterable[tuple[str, Any]] | AsyncIterable[tuple[str, Any]],
) -> AsyncIterator[tuple[str, Any]]:
    """The items of an iterable of either kind."""
    if isinstance(weights, AsyncIterable):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
