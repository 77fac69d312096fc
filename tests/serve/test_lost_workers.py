"""Worker processes that are killed or stopped from outside: tasks run again, health says it."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rjax.serve.protocol.errors import ApiError
from rjax.serve.workers import pool as pool_module
from rjax.serve.workers import zygote as zygote_module
from rjax.serve.workers.pool import WorkerPool
from rjax.serve.workers.worker_process import WorkerProcess
from rjax.serve.workers.zygote import Zygote

from .hostile import SHORT, ask, until
from .live_server import LiveServer
from .test_workers import encode, in_pool, until_gone


async def until_async(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        await asyncio.sleep(0.01)


def signal_each(pool: WorkerPool, number: signal.Signals) -> list[int]:
    """Send a signal to each new worker of a pool; return the list of their process ids."""
    fork, pids = pool._fork, []

    async def signalled() -> WorkerProcess:
        worker = await fork()
        os.kill(worker.pid, number)
        pids.append(worker.pid)
        return worker

    pool._fork = signalled
    return pids


@contextlib.contextmanager
def own_zygote() -> Iterator[Zygote]:
    own = Zygote()
    try:
        yield own
    finally:
        own.close()


@pytest.mark.parametrize("noticed", [True, False])
def test_a_worker_that_was_killed_while_idle_harms_no_task(folder, noticed):
    async def work(pool: WorkerPool) -> None:
        os.kill(pool._idle[0].pid, signal.SIGKILL)
        if noticed:
            await until_async(lambda: pool._idle[0].has_ended)
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work)


def test_a_task_whose_worker_is_killed_runs_again(folder):
    async def work(pool: WorkerPool) -> None:
        pid = pool._idle[0].pid
        os.kill(pid, signal.SIGSTOP)  # so that it has the task and no answer
        asked = asyncio.ensure_future(encode(pool, "a"))
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        assert (await asked)[0]["sizes"] == [1]
        await until_gone(pid)

    in_pool(folder, work)


@pytest.mark.sample(1, 0)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_task_that_loses_two_workers_is_the_servers_fault(folder, number):
    async def work(pool: WorkerPool) -> None:
        pool._end(pool._idle.pop())
        pids = signal_each(pool, number)
        with pytest.raises(ApiError, match=r"tokenising failed: .* try again later") as error:
            await encode(pool, "a")
        assert (error.value.status, error.value.code) == (503, "worker_lost")
        assert len(pids) >= 2
        for pid in pids[:2]:
            await until_gone(pid)
        del pool._fork
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV])
def test_an_allocation_that_fails_in_native_code_is_the_clients_fault(folder, number):
    """It ends the process by these signals, and the task would end the next one too."""

    async def work(pool: WorkerPool) -> None:
        pid = pool._idle[0].pid
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.ensure_future(encode(pool, "a"))
        await asyncio.sleep(0.1)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(ApiError, match="bytes of memory") as error:
            await asked
        assert (error.value.status, error.value.code) == (400, "too_large")
        assert not pool._idle, "it ran again"

    in_pool(folder, work)


@pytest.mark.slow
def test_a_stopped_idle_worker_is_replaced(folder):
    async def work(pool: WorkerPool) -> float:
        pid = pool._idle[0].pid
        os.kill(pid, signal.SIGSTOP)
        start = time.monotonic()
        assert (await encode(pool, "a"))[0]["sizes"] == [1]
        seconds = time.monotonic() - start
        await until_gone(pid)
        return seconds

    assert in_pool(folder, work, task_seconds=120.0) < 30


@pytest.mark.thorough
def test_a_worker_that_is_stopped_at_work_is_replaced(folder):
    """Its task goes on in the slow slot that it has; a busy one is told from it."""

    async def work(pool: WorkerPool) -> None:
        pid, lost = pool._idle[0].pid, signal_each(pool, signal.SIGCONT)
        asked = asyncio.ensure_future(encode(pool, "a b " * 20_000_000))
        await asyncio.sleep(2.5)  # it is slow, and was looked after
        assert not lost
        os.kill(pid, signal.SIGSTOP)
        await until_async(lambda: bool(lost))
        await until_gone(pid)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work, quick=1, task_bytes=2**40, task_seconds=60.0)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_zygote_starts_anew(folder, monkeypatch, number):
    monkeypatch.setattr(zygote_module, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(pool_module, "_LATE_SECONDS", 0.2)

    async def work(pool: WorkerPool) -> None:
        first = own._process.pid
        [worker] = pool._idle
        os.kill(first, number)
        assert (await encode(pool, "a"))[0]["sizes"] == [1], "an idle worker needs no zygote"
        os.kill(worker.pid, signal.SIGKILL)
        asked = asyncio.ensure_future(encode(pool, "a"))
        await until_async(lambda: pool.is_hung)  # the next one is late
        assert (await asked)[0]["sizes"] == [1]
        assert not pool.is_hung
        assert own._process.pid != first
        await until_gone(first)

    with own_zygote() as own:
        in_pool(folder, work, own=own)


@pytest.mark.slow
def test_a_stopped_zygote_keeps_no_task_from_its_end(folder):
    async def work(pool: WorkerPool) -> None:
        pid = pool._idle[0].pid
        os.kill(own._process.pid, signal.SIGSTOP)
        with pytest.raises(ApiError, match="longer than"):
            await encode(pool, "a b " * 20_000_000)
        end = time.monotonic() + 60
        while time.clock_gettime(~pid << 3 | 2) != await cpu_later(pid):
            assert time.monotonic() < end, "it goes on"

    async def cpu_later(pid: int) -> float:
        await asyncio.sleep(0.2)
        return time.clock_gettime(~pid << 3 | 2)

    with own_zygote() as own:
        in_pool(folder, work, own=own, task_bytes=2**40)


@pytest.mark.thorough
def test_a_task_that_no_longer_waits_leaves_its_worker_to_the_next(folder, monkeypatch):
    monkeypatch.setattr(pool_module, "_LATE_SECONDS", 0.1)
    monkeypatch.setattr(pool_module, "_START_SECONDS", 0.2)

    async def work(pool: WorkerPool) -> None:
        pool._end(pool._idle.pop())
        fork, may_fork, forks = pool._fork, asyncio.Event(), 0

        async def late() -> WorkerProcess:
            nonlocal forks
            forks += 1
            await may_fork.wait()
            return await fork()

        pool._fork = late
        for _ in range(5):
            with pytest.raises(ApiError, match="start no worker process now") as error:
                await encode(pool, "a")
            assert (error.value.status, error.value.code) == (503, "worker_lost")
        assert pool.is_hung
        assert forks == 2, "one for the tasks, and one for the trial of workers"
        may_fork.set()
        await until_async(lambda: not (pool.is_hung or pool._unclaimed))
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work)


@pytest.mark.thorough
def test_health_says_that_no_worker_can_answer(server: LiveServer, monkeypatch):
    pool = server.service.texts

    def fork(*args: Any) -> Any:
        raise ChildProcessError("no worker process could be started: too many processes")

    assert ask(server, "POST", "/v1/completions", SHORT).status == 200
    monkeypatch.setattr(pool._zygote, "fork", fork)
    for worker in pool._idle:
        os.kill(worker.pid, signal.SIGKILL)
    answer = ask(server, "POST", "/v1/completions", SHORT)
    assert answer.status == 503
    assert answer.json["error"]["code"] == "worker_lost"
    assert answer.headers["retry-after"] == "2"
    for path in ("/health", "/ping"):
        health = ask(server, "GET", path)
        assert (health.status, health.json["status"]) == (503, "workers_hung")
    monkeypatch.undo()
    # Without a request, which a proxy would not send now.
    until(lambda: ask(server, "GET", "/health").status == 200)
    assert ask(server, "POST", "/v1/completions", SHORT).status == 200
