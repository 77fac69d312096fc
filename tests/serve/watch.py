"""What an attack does to a server: how long its event loop stood still, what stays in memory, how
long others waited.

Other work of a busy machine is no attack's: times leave out those for which a thread here was ready
to run and had no core.
"""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2

from .live_server import LiveServer

HONEST = {"prompt": "a", "max_tokens": 2, "temperature": 0}
HONEST_SECONDS = 3.0
_TICK = 0.005


def kept_waiting(*threads: int) -> float:
    """Seconds for which these threads of this process, given by their native ids, were ready to run
    and had no core, added; 0 where the kernel does not count them. A thread that waits for a lock
    is not ready."""
    found = 0
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended, or there is no such file
            found += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
    return found / 1e9


class Stopwatch:
    """Seconds, less those for which the threads that Python has at the start waited for a core."""

    def __init__(self) -> None:
        self._threads = [t.native_id for t in threading.enumerate() if t.native_id is not None]
        self._start = self._now()

    def lap(self) -> float:
        """Seconds since the start or the last lap."""
        before, self._start = self._start, self._now()
        return max(0.0, self._start - before)

    def _now(self) -> float:
        return time.perf_counter() - kept_waiting(*self._threads)


class LongestPause:
    """The longest time of an event loop between two turns, in seconds, while `run` runs on it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def run(self, ended: Callable[[], bool]) -> None:
        """Measure until ``ended`` says so."""
        thread = threading.get_native_id()
        last = time.perf_counter() - kept_waiting(thread)
        while not ended():
            await asyncio.sleep(_TICK)
            now = time.perf_counter() - kept_waiting(thread)
            self.seconds, last = max(self.seconds, now - last - _TICK), now


class Watch:
    """Seconds of the longest pause of an event loop, and of the slowest honest request."""

    def __init__(self) -> None:
        self.pause = 0.0
        self.honest = 0.0


@contextlib.contextmanager
def watched(server: LiveServer, *, honest: bool = False) -> Iterator[Watch]:
    """Watch the server's loop for the length of the block, perhaps beside an honest client."""
    found, pause = Watch(), LongestPause()
    ended = threading.Event()

    def ask() -> None:
        with httpx2.Client(timeout=120) as client:
            while not ended.is_set():
                watch = Stopwatch()
                answer = client.post(server.url + "/v1/completions", json=HONEST)
                assert answer.status_code == 200, answer.text
                assert client.get(server.url + "/health").status_code == 200
                found.honest = max(found.honest, watch.lap())

    beating = asyncio.run_coroutine_threadsafe(pause.run(ended.is_set), server.loop)
    asking = threading.Thread(target=ask)
    if honest:
        asking.start()
    try:
        yield found
    finally:
        ended.set()
        beating.result(120)
        found.pause = pause.seconds
        if honest:
            asking.join(120)
            assert found.honest > 0, "the honest client met an error"


def best_of_two(measure: Callable[[], float], bound: float) -> None:
    """Assert a bound on seconds; once more where other work on the machine may be to blame."""
    seconds = [measure()]
    if seconds[0] > bound:
        seconds.append(measure())
    assert min(seconds) <= bound, f"{seconds} are over {bound} s"


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_memory(before: int) -> None:
    """Assert that at most 200 MB more than before are in use."""
    if resident() - before >= 200e6:
        gc.collect()
    assert resident() - before < 200e6
