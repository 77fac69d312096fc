"""Device time by kernel, from the profiler."""

import collections
import dataclasses
import heapq
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTime:
    """How often one kernel ran, and its device time in seconds.

    Kernels overlap where one starts before those that it depends on have ended. Time then counts
    for the kernel that ends first, so the times of all kernels add up to that in which any ran.
    """

    name: str
    count: float
    seconds: float

    def of_one(self, runs: int) -> "KernelTime":
        """The kernel in one of ``runs`` equal runs."""
        return KernelTime(self.name, self.count / runs, self.seconds / runs)


def kernel_times(run: Callable[[], object], runs: int = 4) -> tuple[list[KernelTime], float]:
    """The kernels of one run, longest first, and the seconds in which any kernel ran.

    Args:
        run: dispatches the work; called once to warm up and ``runs`` times under the profiler.
        runs: number of calls to average.
    """
    jax.block_until_ready(run())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(runs):
                jax.block_until_ready(run())
        events = [
            (event.name, event.start_ns, event.duration_ns)
            for file in Path(folder).rglob("*.xplane.pb")
            for plane in ProfileData.from_file(str(file)).planes
            if plane.name.startswith("/device:GPU:0")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    count = collections.Counter(name for name, _, _ in events)
    spent = spent_by_name([(name, start, start + length) for name, start, length in events])
    longest = sorted(spent.items(), key=lambda item: item[1], reverse=True)
    found = [KernelTime(name, count[name] / runs, 1e-9 * t / runs) for name, t in longest]
    return found, 1e-9 * sum(spent.values()) / runs


def spent_by_name(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """The time of each name in spans (name, start, stop), as in `KernelTime`."""
    spent: dict[str, float] = collections.defaultdict(float)
    waiting = sorted(spans, key=lambda span: span[1], reverse=True)
    running: list[tuple[float, str]] = []
    moments = sorted({moment for _, *both in spans for moment in both})
    for now, following in itertools.pairwise(moments):
        while waiting and waiting[-1][1] <= now:
            name, _, stop = waiting.pop()
            heapq.heappush(running, (stop, name))
        while running and running[0][0] <= now:
            heapq.heappop(running)
        if running:
            spent[running[0][1]] += following - now
    return spent
