"""What the watches of attacks see, and that other work of the machine is none of it."""

import asyncio
import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .watch import LongestPause, Stopwatch, kept_waiting


def longest_pause(work: Callable[[], None]) -> float:
    async def run() -> float:
        pause, ended = LongestPause(), False
        watching = asyncio.ensure_future(pause.run(lambda: ended))
        await asyncio.sleep(0.02)
        work()
        await asyncio.sleep(0.02)
        ended = True
        await watching
        return pause.seconds

    return asyncio.run(run())


def test_a_loop_that_waits_is_seen():
    assert longest_pause(lambda: time.sleep(0.3)) > 0.25


def test_a_loop_that_works_is_seen():
    def work() -> None:
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass

    assert longest_pause(work) > 0.25


def test_a_wait_for_another_thread_counts():
    """The other one sleeps, as one does that waits for a device."""
    watch = Stopwatch()
    other = threading.Thread(target=time.sleep, args=(1.0,))
    other.start()
    other.join()
    assert watch.lap() > 0.25
    assert watch.lap() < 0.5


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count it"
)
def test_a_wait_for_a_core_does_not_count():
    """Two threads share one core, and work without Python's lock."""
    core, begun = {min(os.sched_getaffinity(0))}, threading.Barrier(2)
    whole, own = [], []

    def work() -> None:
        os.sched_setaffinity(0, core)  # of this thread
        thread, block = threading.get_native_id(), bytes(2**20)
        begun.wait()
        start, waited, end = time.perf_counter(), kept_waiting(thread), time.thread_time() + 0.3
        while time.thread_time() < end:
            hashlib.sha256(block)
        whole.append(time.perf_counter() - start)
        own.append(whole[-1] - (kept_waiting(thread) - waited))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(own) < 0.8 * sum(whole)
    assert min(own) > 0.25
    assert kept_waiting(0) == 0, "there is no such thread"
