"""Worker processes: what takes too long or too much memory is killed, and nobody else waits."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rjax.errors import ContextLengthError, InvalidRequestError, OverloadedError
from rjax.serve.protocol.errors import ApiError
from rjax.serve.workers import frames
from rjax.serve.workers.pool import WorkerLimits, WorkerPool
from rjax.serve.workers.task_slots import TaskSlots
from rjax.serve.workers.tasks import TextModel
from rjax.serve.workers.zygote import Zygote

from .live_server import zygote

LIMITS = {
    "quick": 2,
    "slow": 1,
    "queued": 4,
    "wait_seconds": 20.0,
    "task_seconds": 2.0,
    "task_bytes": 2**28,
}


def in_pool[T](
    folder: Path,
    work: Callable[[WorkerPool], Awaitable[T]],
    *,
    shared: bool = False,
    own: Zygote | None = None,
    **more: float,
) -> T:
    model = TextModel(folder=str(folder), chat_template=None, vocab_size=4160, eos_token_ids=[1])

    async def run() -> T:
        limits = WorkerLimits(**{**LIMITS, **more})  # type: ignore[arg-type]
        pool = WorkerPool(own or zygote(), model, limits, shared=shared)
        await pool.start()
        try:
            return await work(pool)
        finally:
            pool.close()

    return asyncio.run(run())


def encode(pool: WorkerPool, text: str, tenant: str = "a", **more: object) -> Awaitable:
    data = text.encode()
    head = {"task": "encode", "sizes": [len(data)], "add_special_tokens": False, "last": None}
    head |= {"most_tokens": 10**9, "max_model_len": 4, **more}
    return pool.run(head, data, tenant=tenant, what="tokenising")


def is_gone(pid: int) -> bool:
    """Whether a process has ended and its parent has asked for its status."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until_gone(pid: int) -> None:
    end = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_answers_are_the_tokenizers(folder):
    async def work(pool: WorkerPool) -> dict:
        with pytest.raises(ContextLengthError, match=r"length is 4 tokens.* at most 3 fit"):
            await encode(pool, "Who lives in Peru, and who in Chile?", most_tokens=3)
        with pytest.raises(InvalidRequestError, match="at most 4 are") as error:  # to count them
            await encode(pool, "Who lives in Peru, and who in Chile?", most_tokens=4)
        assert not isinstance(error.value, ContextLengthError)
        head, _ = await encode(pool, "Who lives in Peru, and who in Chile?", last=3, most_tokens=3)
        return head

    assert in_pool(folder, work)["sizes"] == [3]


def test_a_task_is_killed_after_its_time(folder):
    """The limit is on the work: the process has ended when the client has its answer."""

    async def work(pool: WorkerPool) -> None:
        pid = pool._idle[0].pid
        with pytest.raises(ApiError, match="longer than 2 seconds") as error:
            await encode(pool, "a b " * 20_000_000)
        assert error.value.code == "too_slow"
        await until_gone(pid)
        assert (await encode(pool, "a"))[0]["sizes"] == [1]  # at once, by another process

    in_pool(folder, work, task_bytes=2**40)


def test_a_task_is_ended_by_its_memory(folder):
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(ApiError, match="bytes of memory") as error:
            await encode(pool, "a b " * 10_000_000)
        assert error.value.code == "too_large"
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work, task_bytes=2**27, task_seconds=60.0)


@pytest.mark.thorough
def test_quick_tasks_do_not_wait_for_slow_ones(folder):
    async def work(pool: WorkerPool) -> None:
        slow = [asyncio.ensure_future(encode(pool, "a b " * 20_000_000)) for _ in range(4)]
        await asyncio.sleep(0.2)
        assert (await encode(pool, "a", "b"))[0]["sizes"] == [1]
        # One slow place: the others are asked to come again, and none is told that it is at fault.
        running = set(slow)
        while len(running) > 1:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            assert {type(task.exception()) for task in ended} == {OverloadedError}
        running.pop().cancel()

    in_pool(folder, work, task_bytes=2**40, task_seconds=60.0)


def test_a_cancelled_task_is_killed(folder):
    async def work(pool: WorkerPool) -> None:
        pid = pool._idle[0].pid
        task = asyncio.ensure_future(encode(pool, "a b " * 20_000_000))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_gone(pid)
        assert (await encode(pool, "a"))[0]["sizes"] == [1]

    in_pool(folder, work, quick=1, task_bytes=2**40, task_seconds=60.0)


def test_a_killed_zygote_starts_anew_and_leaves_nothing(folder):
    model = TextModel(folder=str(folder), chat_template=None, vocab_size=4160, eos_token_ids=[1])
    own = Zygote()
    try:
        first, old = own.fork(model, 2**28)
        os.kill(own._process.pid, signal.SIGKILL)
        own._process.wait()
        second, new = own.fork(model, 2**28)
        with old, new:
            assert old.recv(1) == b"", "its worker has ended"
            text = {"task": "encode", "sizes": [1], "add_special_tokens": False}
            new.sendall(
                frames.pack(text | {"last": None, "most_tokens": 9, "max_model_len": 9}, b"a")
            )
            answer = frames.receive(new)
            assert answer is not None and answer[0]["sizes"] == [1]
            own.end(first)  # of another zygote: nothing happens
            own.end(second)
            assert new.recv(1) == b""
    finally:
        own.close()


def test_tenants_take_turns():
    async def run() -> list[str]:
        slots = TaskSlots(quick=1, slow=1, queued=3, shared=True)
        order: list[str] = []

        async def one(tenant: str) -> None:
            slot = await slots.enter(tenant, 20.0)
            order.append(tenant)
            await asyncio.sleep(0)
            slot.leave()

        first = await slots.enter("a", 20.0)
        tasks = [asyncio.ensure_future(one(tenant)) for tenant in ("a", "a", "a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="3 texts of yours"):
            await slots.enter("a", 20.0)
        gone = asyncio.ensure_future(one("c"))
        await asyncio.sleep(0)
        gone.cancel()
        first.leave()
        await asyncio.gather(*tasks)
        return order

    assert asyncio.run(run()) == ["a", "b", "a", "a"]


def test_a_place_that_comes_too_late_is_given_on():
    async def run() -> None:
        slots = TaskSlots(quick=1, slow=1, queued=3, shared=False)
        first = await slots.enter("a", 20.0)
        with pytest.raises(OverloadedError):
            await slots.enter("b", 0.01)
        first.leave()
        second = await slots.enter("c", 0.01)
        assert second.slow_down()
        third = await slots.enter("c", 0.01)  # the slow one left a quick place
        assert not third.slow_down()
        second.leave()
        assert third.slow_down()

    asyncio.run(run())


def test_a_slot_goes_past_a_task_that_was_cancelled_a_moment_ago():
    async def scenario() -> None:
        slots = TaskSlots(quick=1, slow=1, queued=3, shared=False)
        first = await slots.enter("a", 10)
        cancelled = asyncio.create_task(slots.enter("a", 10))
        patient = asyncio.create_task(slots.enter("a", 10))
        await asyncio.sleep(0)
        cancelled.cancel()
        first.leave()  # before the cancelled task runs
        (await patient).leave()
        assert cancelled.cancelled()
        (await slots.enter("a", 0.1)).leave()  # no slot is lost

    asyncio.run(scenario())


def test_of_several_tenants_none_has_all_slow_places():
    slots = TaskSlots(quick=9, slow=2, queued=3, shared=True)
    assert [slots.take_slow(tenant) for tenant in ("a", "a", "b", "b")] == [
        True,
        False,
        True,
        False,
    ]
