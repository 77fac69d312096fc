"""RjaxReplica: starts a server of rjax where verl places a replica."""

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from rjax.integrations.verl.rollout import server_name
from rjax.integrations.verl.server import RjaxServer


class RjaxReplica(RolloutReplica):
    """One server of rjax on the devices of its workers, all on one node.

    The arguments are those of verl's `RolloutReplica`.

    Raises:
        NotImplementedError: the replica spans nodes, or is data or pipeline parallel.
    """

    _server_handle: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        own = self.config
        if self.nnodes > 1 or own.data_parallel_size > 1 or own.pipeline_model_parallel_size > 1:
            raise NotImplementedError(
                f"a replica has {self.nnodes} nodes, data_parallel_size "
                f"{own.data_parallel_size} and pipeline_model_parallel_size "
                f"{own.pipeline_model_parallel_size}; an engine of rjax has one node and "
                "tensor_model_parallel_size: set the others to 1, for more replicas"
            )

    async def launch_servers(self) -> None:
        """Start the server on its workers' node, with their devices."""
        resource = get_resource_name()
        places = await asyncio.gather(
            *[
                worker.__ray_call__.remote(
                    lambda _: (
                        ray.get_runtime_context().get_node_id(),
                        ray.get_runtime_context().get_accelerator_ids()[resource][0],
                    )
                )
                for worker in self.workers
            ]
        )
        nodes = {node for node, _ in places}
        assert len(nodes) == 1, f"the workers of a replica are on {len(nodes)} nodes"
        prefix = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server: Any = (
            ray.remote(RjaxServer)
            .options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(nodes.pop(), soft=False),
                runtime_env={
                    "env_vars": {name: "1" for name in get_platform().ray_noset_envvars()}
                },
                name=server_name(self.replica_rank, prefix) + self.name_suffix,
                max_concurrency=self.max_concurrency,
            )
            .remote(
                self.config,
                self.model_config,
                self.rollout_mode,
                self.replica_rank,
                ",".join(str(device) for _, device in places),
            )
        )
        self.servers = [server]
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self._server_handle = server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def sleep(self) -> None:
        """Give back the device memory, once the requests under way have ended."""
        await self._server_handle.wait_for_requests_to_drain.remote()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        """Give back the device memory of the KV pool, once the requests under way have ended."""
        await self._server_handle.wait_for_requests_to_drain.remote()
        await super().release_kv_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort the requests under way; see `RjaxServer.abort_all_requests`."""
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """Abort one request; see `RjaxServer.abort_request`."""
        return await self._server_handle.abort_request.remote(request_id)
