"""The outputs of a step on their way to their sinks: order, turns of the event loop, joining."""

import asyncio
import time

import pytest

from rjax.api.async_engine import AsyncLLMEngine
from rjax.errors import EngineDeadError, InvalidRequestError, OverloadedError
from rjax.outputs import CompletionOutput, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

from .test_async_engine import CountingEngine


class Sink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self.refuses = False

    def put(self, output: RequestOutput) -> None:
        if self.refuses:
            raise OverloadedError("too many", "unread_tokens")
        self.outputs.append(output)
        if output.finished:
            self.ended.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.outputs[0].token_ids]


def params(count: int, kind: RequestOutputKind = RequestOutputKind.DELTA) -> SamplingParams:
    return SamplingParams(max_tokens=count, output_kind=kind, detokenize=False)


async def started(engine: CountingEngine) -> AsyncLLMEngine:
    found = AsyncLLMEngine(engine)
    await found.start()
    return found


def test_a_large_step_leaves_the_loop_to_others_in_between():
    async def run() -> None:
        found = CountingEngine()
        engine = await started(found)
        sinks = [Sink() for _ in range(500)]
        most, had = 0, 0

        async def watch() -> None:
            nonlocal most, had
            while True:
                now = sum(len(sink.outputs) for sink in sinks)
                most, had = max(most, now - had), now
                await asyncio.sleep(0)

        found.gate.clear()
        asked = [asyncio.ensure_future(engine.submit([1], params(1), sink=s)) for s in sinks]
        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        found.gate.set()
        await asyncio.gather(*asked)
        await asyncio.wait_for(asyncio.gather(*(sink.ended.wait() for sink in sinks)), 60)
        watching.cancel()
        assert [sink.tokens for sink in sinks] == [[0]] * 500
        assert most <= 2 * 128  # two turns may lie between two looks
        await engine.stop()

    asyncio.run(run())


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_late_loop_gets_the_outputs_of_several_steps_joined(kind):
    class Stepping(CountingEngine):
        """Counts its steps with tokens, the first of which comes when all requests are there."""

        steps = 0
        ready = False

        def step(self) -> list[RequestOutput]:
            if not self.ready:
                return []
            outputs = super().step()
            for output in outputs:
                if kind is RequestOutputKind.CUMULATIVE:
                    output.outputs[0].token_ids = list(range(output.outputs[0].token_ids[0] + 1))
            self.steps += 1
            return outputs

    async def run() -> None:
        found = Stepping()
        engine = await started(found)
        # More requests than one turn hands over, so that the later ones wait while steps go on.
        sinks = [Sink() for _ in range(150)]
        for sink in sinks:
            await engine.submit([1], params(300, kind), sink=sink)
        found.ready = True
        end = time.monotonic() + 60
        while found.steps < 20:  # the loop is held up
            assert time.monotonic() < end
            time.sleep(0.001)
        await asyncio.wait_for(asyncio.gather(*(sink.ended.wait() for sink in sinks)), 60)
        for sink in sinks:
            if kind is RequestOutputKind.DELTA:
                assert sink.tokens == list(range(300))
            else:
                assert sink.outputs[-1].outputs[0].token_ids == list(range(300))
            assert [output.finished for output in sink.outputs][:-1].count(True) == 0
        assert min(len(sink.outputs) for sink in sinks) < 300
        await engine.stop()

    asyncio.run(run())


def test_a_sink_that_refuses_is_aborted_alone():
    async def run() -> None:
        found = CountingEngine()
        engine = await started(found)
        slow, other = Sink(), Sink()
        slow.refuses = True
        first = await engine.submit([1], params(10**6), sink=slow)
        second = await engine.submit([1], params(10**6), sink=slow)
        kept = await engine.submit([1], params(300), sink=other)
        await asyncio.wait_for(other.ended.wait(), 60)
        assert other.tokens == list(range(300))
        assert {first.engine_id, second.engine_id} <= set(found.aborted)
        kept.finished = True
        engine.release(kept)
        assert engine.num_live == 0
        await engine.stop()

    asyncio.run(run())


def test_a_failure_comes_after_the_outputs_before_it():
    async def run() -> None:
        found = CountingEngine()
        engine = await started(found)
        sinks = [Sink() for _ in range(300)]
        found.gate.clear()
        asked = [asyncio.ensure_future(engine.submit([1], params(50), sink=s)) for s in sinks]
        await asyncio.sleep(0)
        found.gate.set()
        await asyncio.gather(*asked)
        poison = SamplingParams(max_tokens=5, seed=666)
        failing = asyncio.ensure_future(engine.submit([1], poison, sink=Sink()))
        await asyncio.wait_for(asyncio.gather(*(sink.ended.wait() for sink in sinks)), 60)
        await asyncio.wait([failing])
        for sink in sinks:
            assert sink.tokens == list(range(len(sink.tokens)))
            if sink.error is None:
                assert len(sink.tokens) == 50
            else:
                assert isinstance(sink.error, EngineDeadError)

    asyncio.run(run())


def test_a_name_that_is_used_again_gets_no_output_of_the_request_before():
    class LastWords(CountingEngine):
        """Reports an aborted request once more, as an engine does."""

        def __init__(self) -> None:
            super().__init__()
            self.last: list[RequestOutput] = []

        def abort_request(self, request_id: str) -> None:
            super().abort_request(request_id)
            text = CompletionOutput(0, "old", [99], finish_reason="abort")
            self.last.append(RequestOutput(request_id, None, [1], outputs=[text], finished=True))

        def step(self) -> list[RequestOutput]:
            last, self.last = self.last, []
            return last + super().step()

    async def run() -> None:
        found = LastWords()
        engine = await started(found)
        found.gate.clear()
        first = await engine.submit([1], params(10**6), sink=Sink(), request_id="a")
        with pytest.raises(InvalidRequestError, match="'a' is in use"):
            await engine.submit([1], params(3), sink=Sink(), request_id="a")
        first.close()
        again = Sink()
        adding = asyncio.ensure_future(engine.submit([1], params(3), sink=again, request_id="a"))
        await asyncio.sleep(0)
        found.gate.set()
        await adding
        await asyncio.wait_for(again.ended.wait(), 60)
        assert again.tokens == [0, 1, 2]
        assert {output.request_id for output in again.outputs} == {"a"}
        await engine.stop()

    asyncio.run(run())
