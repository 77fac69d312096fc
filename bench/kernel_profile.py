"""Device time by kernel, from the profiler."""

import collections
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.profiler import ProfileData


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTime:
    """How often one kernel ran, and its device time in seconds."""

    name: str
    count: float
    seconds: float

    def of_one(self, runs: int) -> "KernelTime":
        """Of one of ``runs`` equal runs."""
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
    count: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    for name, _, duration in events:
        count[name] += 1
        spent[name] += round(duration)
    found = [KernelTime(n, count[n] / runs, 1e-9 * t / runs) for n, t in spent.most_common()]
    return found, _busy([(start, start + length) for _, start, length in events]) / runs


def _busy(spans: list[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans (ns) covers."""
    covered, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        covered += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return 1e-9 * covered
