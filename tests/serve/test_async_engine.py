"""The engine's thread: streams, aborts, errors of one request and of all, the heartbeat."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from rjax.api import async_engine
from rjax.api.async_engine import AsyncLLMEngine, QueueLimits
from rjax.batch.compile_progress import CompileProgress
from rjax.engine.protocol import Engine
from rjax.errors import EngineDeadError, InvalidRequestError, OverloadedError
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams
from tests.engine_streams import collect, tokens, until, until_stuck


class CountingEngine(Engine):
    """Gives each request the tokens 0, 1, 2, ... one a step; prompts say what goes wrong."""

    tokenizer = None

    def __init__(self) -> None:
        self.live: dict[str, tuple[int, SamplingParams]] = {}
        self.aborted: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[int] = set()
        self.compiling = False

    def compile_progress(self) -> CompileProgress:
        return CompileProgress(0, 0, waiting=self.compiling)

    def stats(self) -> int:
        return len(self.live)

    def add_request(self, request_id, prompt_token_ids, params, *, prompt=None, priority=0):
        if prompt_token_ids == [13]:
            raise InvalidRequestError("thirteen")
        if prompt_token_ids == [14]:
            raise ZeroDivisionError
        self.live[request_id] = (0, params)

    def step(self) -> list[RequestOutput]:
        self.gate.wait(60)
        self.threads.add(threading.get_ident())
        outputs = []
        for name, (count, params) in list(self.live.items()):
            done = count + 1 == params.max_tokens
            if params.seed == 666:
                raise MemoryError("the device is gone")
            self.live[name] = (count + 1, params)
            if done:
                del self.live[name]
            text = CompletionOutput(0, "x", [count], finish_reason="length" if done else None)
            outputs.append(RequestOutput(name, None, [1], outputs=[text], finished=done))
        return outputs

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def abort_request(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self.aborted.append(request_id)


def drive(
    test: Callable[[AsyncLLMEngine, CountingEngine], Coroutine[Any, Any, None]], **limits: Any
) -> None:
    """Run a test on a started engine, and stop it."""

    async def whole() -> None:
        inner = CountingEngine()
        engine = AsyncLLMEngine(inner, QueueLimits(**limits))
        await engine.start()
        try:
            await asyncio.wait_for(test(engine, inner), 120)
        finally:
            inner.gate.set()
            await engine.stop()

    asyncio.run(whole())


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets by how many seconds the clock is ahead that the age of a heartbeat is measured with."""

    def ahead(seconds: float) -> None:
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
        monkeypatch.setattr(async_engine, "time", clock)

    return ahead


def test_streams_are_whole_and_the_loop_stays_free():
    async def test(engine, inner):
        found = await asyncio.gather(*(collect(engine, [1], tokens(n)) for n in range(1, 30)))
        assert found == [list(range(n)) for n in range(1, 30)]
        assert threading.get_ident() not in inner.threads
        assert engine.num_live == 0

    drive(test)


def test_a_slow_step_does_not_hold_up_the_loop():
    async def test(engine, inner):
        inner.gate.clear()
        task = asyncio.ensure_future(collect(engine, [1], tokens(2)))
        await until(lambda: bool(inner.live))
        start = time.monotonic()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert time.monotonic() - start < 30  # the gate would hold it up for 60
        assert not task.done()
        inner.gate.set()
        assert await task == [0, 1]

    drive(test)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_leaving_or_cancelling_aborts(after):
    async def test(engine, inner):
        async with await engine.submit([1], tokens(10**6)) as stream:
            for _ in range(after):
                await anext(stream)
        await until(lambda: inner.aborted == [stream.engine_id])
        task = asyncio.ensure_future(collect(engine, [1], tokens(10**6)))
        await until(lambda: bool(inner.live))
        task.cancel()
        await until(lambda: len(inner.aborted) == 2 and not inner.live)
        assert engine.num_live == 0

    drive(test)


def test_cancelled_while_submitting_aborts():
    async def test(engine, inner):
        inner.gate.clear()
        first = asyncio.ensure_future(collect(engine, [1], tokens(10**6)))
        await until(lambda: bool(inner.live))
        second = asyncio.ensure_future(engine.submit([1], tokens(10**6)))
        await asyncio.sleep(0.01)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        inner.gate.set()
        await until(lambda: len(inner.aborted) == 2 and not inner.live)
        assert engine.num_live == 0

    drive(test)


@pytest.mark.parametrize(
    ("prompt", "error"), [([13], InvalidRequestError), ([14], ArithmeticError)]
)
def test_refused_request_harms_no_other(prompt, error):
    async def test(engine, inner):
        good = asyncio.ensure_future(collect(engine, [1], tokens(50)))
        with pytest.raises(error):
            await engine.submit(prompt, tokens(5))
        assert await good == list(range(50))
        assert engine.health == "ready"
        assert engine.num_live == 0

    drive(test)


def test_calls_run_between_steps_and_their_errors_are_their_own():
    async def test(engine, inner):
        assert await engine.call(lambda e: threading.get_ident()) != threading.get_ident()
        with pytest.raises(KeyError):
            await engine.call(lambda e: {}["nothing"])
        assert await collect(engine, [1], tokens(3)) == [0, 1, 2]

    drive(test)


def test_failed_step_ends_every_request_and_health():
    async def test(engine, inner):
        inner.gate.clear()
        others = [asyncio.ensure_future(collect(engine, [1], tokens(100))) for _ in range(3)]
        await until(lambda: bool(inner.live))
        bad = asyncio.ensure_future(collect(engine, [1], tokens(100, seed=666)))
        await asyncio.sleep(0.01)
        inner.gate.set()
        found = await asyncio.gather(*others, bad, return_exceptions=True)
        assert all(isinstance(f, EngineDeadError) for f in found)
        assert engine.health == "dead"
        with pytest.raises(EngineDeadError):
            await engine.submit([1], tokens(1))
        with pytest.raises(EngineDeadError):
            await engine.call(lambda e: None)

    drive(test)


def test_silent_engine_is_unhealthy(later):
    async def test(engine, inner):
        inner.gate.clear()
        task = asyncio.ensure_future(collect(engine, [1], tokens(2)))
        await until_stuck(engine)
        assert engine.health == "ready"
        later(1000.0)
        assert engine.health == "hung"
        with pytest.raises(EngineDeadError):
            await engine.submit([1], tokens(1))
        later(0.0)
        inner.gate.set()
        assert await task == [0, 1]
        assert engine.health == "ready"

    drive(test, heartbeat_seconds=500.0)


def test_a_step_that_compiles_is_healthy_and_has_figures(later):
    async def test(engine, inner):
        assert await engine.stats() == 0
        inner.gate.clear()
        inner.compiling = True
        task = asyncio.ensure_future(collect(engine, [1], tokens(2)))
        await until_stuck(engine)
        later(1000.0)
        assert engine.health == "ready"
        engine.check_capacity(1, 1)
        assert await engine.stats(0.05) == 1
        inner.compiling = False
        assert engine.health == "hung"
        later(0.0)
        inner.gate.set()
        assert await task == [0, 1]
        assert engine.health == "ready"
        assert await engine.stats() == 0

    drive(test, heartbeat_seconds=500.0)


def test_idle_engine_goes_on_giving_signs_of_life():
    async def test(engine, inner):
        for _ in range(2):
            last = engine.channel.heartbeat
            await until(lambda last=last: engine.channel.heartbeat > last)
        assert engine.health == "ready"

    drive(test)


def test_full_queue_refuses_and_recovers():
    async def test(engine, inner):
        inner.gate.clear()
        tasks = [asyncio.ensure_future(collect(engine, [1], tokens(2))) for _ in range(3)]
        await until(lambda: engine.num_live == 3)
        with pytest.raises(OverloadedError, match="sequences"):
            engine.check_capacity(2, 1)
        with pytest.raises(OverloadedError, match="tokens"):
            engine.check_capacity(1, 8)
        engine.check_capacity(1, 7)
        for more in ({"n": 2}, {"best_of": 2, "output_kind": RequestOutputKind.FINAL_ONLY}):
            with pytest.raises(OverloadedError):
                await engine.submit([1], tokens(2, **more))
        inner.gate.set()
        await asyncio.gather(*tasks)
        engine.check_capacity(4, 10)

    drive(test, sequences=4, prompt_tokens=10)


def test_drain_waits_then_gives_up():
    async def test(engine, inner):
        inner.gate.clear()
        short = asyncio.ensure_future(collect(engine, [1], tokens(200)))
        await until(lambda: bool(inner.live))
        draining = asyncio.ensure_future(engine.drain(10))
        await asyncio.sleep(0)
        assert engine.health == "draining"
        with pytest.raises(OverloadedError, match="shutting down"):
            await engine.submit([1], tokens(1))
        inner.gate.set()
        assert await draining
        assert await short == list(range(200))

    drive(test)

    async def endless(engine, inner):
        task = asyncio.ensure_future(collect(engine, [1], tokens(10**9)))
        await until(lambda: engine.num_live == 1)
        assert not await engine.drain(0.05)
        await engine.stop()
        with pytest.raises(OverloadedError):
            await task

    drive(endless)
