"""The router in Ray's machinery: what it is called with, and what it counts."""

import asyncio
from types import SimpleNamespace

import pytest

from rjax.replicas.replica_request import ReplicaRequest

from .ray_serve import (
    DeploymentHandleSource,
    DeploymentID,
    PendingRequest,
    PrefixRouter,
    ReplicaID,
    RequestMetadata,
    RunningReplica,
)

DEPLOYMENT = DeploymentID("Replica", "rjax")


class FakeReplica(RunningReplica):
    """A replica without a process."""

    def __init__(self, name: str) -> None:
        self._replica_info = SimpleNamespace(
            replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=8
        )

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


def pending(number: int, blocks=(), tag: str = "", avoided=()) -> PendingRequest:
    request = ReplicaRequest({}, b"", tuple(blocks), tag, frozenset(avoided))
    metadata = RequestMetadata(request_id=str(number), internal_request_id=str(number))
    return PendingRequest(args=[request], kwargs={}, metadata=metadata)


@pytest.fixture(scope="module")
def no_ray_metrics():
    """The router's own gauges need no cluster."""
    with pytest.MonkeyPatch.context() as patch:
        made = SimpleNamespace(
            set_default_tags=lambda tags: made,
            set=lambda *given, **more: None,
            observe=lambda *given, **more: None,
        )
        for name in ("Gauge", "Histogram"):
            patch.setattr(f"ray.util.metrics.{name}", lambda *given, **more: made)
        yield


def routed(scenario, no_ray_metrics, tolerance: float = 2) -> None:
    async def run() -> None:
        router = PrefixRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state(tolerance=tolerance)
        replicas = [FakeReplica("a"), FakeReplica("b")]
        router.update_replicas(replicas)
        await scenario(router, replicas)

    asyncio.run(run())


def test_equal_prefixes_go_to_one_replica_until_it_is_overloaded(no_ray_metrics):
    async def scenario(router, replicas):
        homes, reasons, all_asked = [], [], []
        for number in range(5):
            asked = pending(number, [b"system", b"user %d" % number])
            all_asked.append(asked.args[0])
            ranks = await router.choose_replicas(replicas, asked)
            assert sorted(r.replica_id.unique_id for (r,) in ranks) == ["a", "b"]
            homes.append(ranks[0][0].replica_id.unique_id)
            reasons.append(asked.args[0].routed_by)
        # Half of each prompt is known: a lead of one request is outweighed, one of two is not.
        assert homes[:2] == [homes[0]] * 2
        assert reasons[:3] == ["new", "prefix", "overloaded"]
        for request in all_asked:
            request.end()
        await asyncio.sleep(0)
        assert set(router._loads.values()) == {0}
        assert not router._under_way

    routed(scenario, no_ray_metrics, tolerance=3)


def test_a_tag_wins_while_its_replica_runs(no_ray_metrics):
    async def scenario(router, replicas):
        for tag in ("a", "b", "a"):
            asked = pending(hash(tag), tag=tag)
            ((chosen,),) = await router.choose_replicas(replicas, asked)
            assert (chosen.replica_id.unique_id, asked.args[0].routed_by) == (tag, "tag")
        gone = pending(9, tag="gone")
        assert len(await router.choose_replicas(replicas, gone)) == 2
        assert gone.args[0].routed_by == "new"

    routed(scenario, no_ray_metrics)


def test_a_replica_that_died_on_a_request_comes_last(no_ray_metrics):
    async def scenario(router, replicas):
        ((first,), _) = await router.choose_replicas(replicas, pending(1, [b"x"]))
        again = pending(2, [b"x"], avoided=[first.replica_id.unique_id])
        ((other,), (last,)) = await router.choose_replicas(replicas, again)
        assert other != first and last == first
        alone = pending(3, [b"x"], avoided=[first.replica_id.unique_id])
        assert await router.choose_replicas([first], alone) == [[first]]

    routed(scenario, no_ray_metrics)


def test_cancelled_and_moved_requests_are_counted_once(no_ray_metrics):
    async def scenario(router, replicas):
        asked = pending(1, [b"x"])
        for _ in range(2):  # Ray asks again when a replica rejects
            ranks = await router.choose_replicas(replicas, asked)
        ((first,), (other,)) = ranks
        asked.future.set_result(other)
        await asyncio.sleep(0)
        assert router._loads == {first.replica_id: 0, other.replica_id: 1}
        left = pending(2, [b"x"])
        await router.choose_replicas(replicas, left)
        left.future.cancel()
        await asyncio.sleep(0)
        assert sum(router._loads.values()) == 1

    routed(scenario, no_ray_metrics)


@pytest.mark.parametrize("when", ["before", "meanwhile", "after"])
def test_a_request_whose_client_leaves_is_counted_out(no_ray_metrics, when):
    """Ray goes on to choose a replica for it."""

    async def scenario(router, replicas):
        asked = pending(1, [b"x"])
        request: ReplicaRequest = asked.args[0]
        if when == "before":
            request.end()
        ranks = await router.choose_replicas(replicas, asked)
        if when == "meanwhile":
            request.end()
        asked.future.set_result(ranks[0][0])
        await asyncio.sleep(0)
        if when == "after":
            assert sum(router._loads.values()) == 1
            request.end()
        await asyncio.sleep(0)
        assert not router._under_way and sum(router._loads.values()) == 0

    routed(scenario, no_ray_metrics)


def test_prefixes_of_replicas_that_end_are_forgotten(no_ray_metrics):
    async def scenario(router, replicas):
        first = pending(1, [b"x"])
        ((home,), (other,)) = await router.choose_replicas(replicas, first)
        router.update_replicas([other])
        again = pending(2, [b"x"])
        ((chosen,),) = await router.choose_replicas([other], again)
        assert (chosen, again.args[0].routed_by) == (other, "new")
        assert home.replica_id not in router._loads
        first.args[0].end()
        await asyncio.sleep(0)
        router.on_replica_actor_died(other.replica_id)
        assert len(router._affinity) == 0

    routed(scenario, no_ray_metrics)
