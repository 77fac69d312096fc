"""A request router of Ray Serve that sends equal prefixes to the same replica.

Ray's ``PrefixCacheAffinityRouter`` needs ``ray[llm]`` (and with it vLLM), matches characters in an
actor that every request calls and waits for, and falls back to two random replicas under
imbalance. This router matches hash chains in the router's own process.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rjax.replicas.prefix_affinity import PrefixAffinity
from rjax.replicas.replica_request import ReplicaRequest


class PrefixRouter(RequestRouter):
    """Routes by `PrefixAffinity`, over the requests that this router has under way.

    The first argument of every request is a `ReplicaRequest`, which says when it has ended. A
    replica at ``max_ongoing_requests`` is passed over by Ray, which then tries the next one.
    """

    def initialize_state(self, *, tolerance: float, **more: Any) -> None:
        """Set up the router; Ray calls this with ``request_router_kwargs``.

        Args:
            tolerance: requests that a replica may have more than another before a prompt whose
                prefix it holds goes elsewhere.
            more: must be empty.
        """
        assert not more, more
        self._affinity: PrefixAffinity[ReplicaID] = PrefixAffinity(tolerance)
        self._under_way: dict[str, ReplicaID] = {}
        self._loads: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates from the best to the worst, one a rank."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is None or not by_id:
            return [candidate_replicas]
        request: ReplicaRequest = pending_request.args[0]
        loads = {name: self._loads.get(name, 0) for name in by_id}
        choice = self._affinity.choose(request.blocks, loads)
        ranked, reason = choice.ranked, choice.reason
        ranked.sort(key=lambda r: r.unique_id in request.avoided)
        tagged = [r for r in ranked if r.unique_id == request.replica_tag]
        if tagged:
            ranked, reason = tagged, "tag"
        request.routed_by = reason
        # Requests that arrive before Ray has the chosen replica must count this one.
        request_id = pending_request.metadata.internal_request_id
        loop = asyncio.get_running_loop()
        request.on_end = functools.partial(_call, loop, functools.partial(self._end, request_id))
        self._begin(request_id, ranked[0])
        self._affinity.remember(request.blocks, ranked[0])
        pending_request.future.add_done_callback(
            lambda chosen: self._chosen(request_id, request, chosen)
        )
        return [[by_id[name]] for name in ranked]

    def _chosen(
        self, request_id: str, request: ReplicaRequest, chosen: "asyncio.Future[RunningReplica]"
    ) -> None:
        """Note the replica that takes the request. Its client may have left meanwhile."""
        if chosen.cancelled() or chosen.exception() is not None or request.ended:
            self._end(request_id)
        else:
            self._begin(request_id, chosen.result().replica_id)
            self._affinity.remember(request.blocks, chosen.result().replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget the prefixes of replicas that are gone."""
        super().update_replicas(replicas)
        self._forget_gone()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the prefixes of a replica that died."""
        super().on_replica_actor_died(replica_id)
        self._forget_gone()

    def _begin(self, request_id: str, replica: ReplicaID) -> None:
        if self._under_way.get(request_id) != replica:
            self._end(request_id)
            self._under_way[request_id] = replica
            self._loads[replica] = self._loads.get(replica, 0) + 1

    def _end(self, request_id: str) -> None:
        replica = self._under_way.pop(request_id, None)
        if replica in self._loads:
            self._loads[replica] -= 1

    def _forget_gone(self) -> None:
        left = set(self.curr_replicas)
        self._affinity.keep_only(left)
        self._under_way = {name: r for name, r in self._under_way.items() if r in left}
        self._loads = {r: n for r, n in self._loads.items() if r in left}


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Call on the router's thread, unless it has ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
