"""What both channels do alike: outputs, refusals, aborts, utilities, masks, health."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from rjax.api import async_engine
from rjax.engine.protocol import KeepAs
from rjax.engine_channel.channel import RemotePrefixEngine
from rjax.engine_channel.error_codec import EngineProcessError
from rjax.errors import (
    GrammarFailedError,
    InvalidRequestError,
    OutOfMemoryError,
    OverloadedError,
)
from rjax.outputs import Logprob
from rjax.sampling import RequestOutputKind, StructuredOutputsParams
from rjax.structured.constraint import Constraint
from rjax.structured.mask_request import MaskRequest
from tests.engine_streams import collect, tokens, until, until_stuck

from .conftest import Side, drive
from .stub_engine import CRASH_OF_ADD, GRAMMAR, LOGPROBS, OVERLOADED, REFUSED


def test_streams_are_whole(side: Side):
    async def test(engine):
        found = await asyncio.gather(*(collect(engine, [1], tokens(n)) for n in range(1, 30)))
        assert found == [list(range(n)) for n in range(1, 30)]
        assert engine.num_live == 0

    drive(side, test)


@pytest.mark.parametrize("kind", ["CUMULATIVE", "FINAL_ONLY"])
def test_whole_outputs(side: Side, kind):
    async def test(engine):
        params = tokens(9, output_kind=RequestOutputKind[kind])
        outputs = [o async for o in engine.generate([1], params)]
        assert outputs[-1].outputs[0].token_ids == list(range(9))
        assert kind == "CUMULATIVE" or len(outputs) == 1

    drive(side, test)


def test_every_field_of_an_output(side: Side):
    async def test(engine):
        before = time.monotonic()
        outputs = [
            o async for o in engine.generate([LOGPROBS, 5], tokens(3), prompt="text", priority=2)
        ]
        for output in outputs:
            assert output.prompt == "text"
            assert output.prompt_token_ids == [LOGPROBS, 5]
            assert output.prompt_logprobs == [None, {3: Logprob(-1.0, 2)}]
            assert output.num_cached_tokens == 4
            assert output.metrics is not None
            assert before < output.metrics.arrival_time <= output.metrics.first_token_time
        logprobs = [entry for o in outputs for entry in o.outputs[0].logprobs]
        assert [entry[7] for entry in logprobs] == [Logprob(-2.0, 3)] * 3
        assert [entry[i] for i, entry in enumerate(logprobs)] == [Logprob(-0.5, 1)] * 3
        last = outputs[-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "length"
        assert last.outputs[0].cumulative_logprob == -1.5
        assert last.metrics.finished_time >= last.metrics.first_token_time
        (output,) = [o async for o in engine.generate([9], tokens(1), prefix="known")]
        assert output.prompt_token_ids == [1, 2, 9]

    drive(side, test)


def test_errors_in_outputs(side: Side):
    async def test(engine):
        outputs = [o async for o in engine.generate([GRAMMAR], tokens(9))]
        ended = outputs[-1].outputs[0]
        assert ended.finish_reason == "error"
        assert isinstance(ended.error, GrammarFailedError)
        assert ended.stop_reason == str(ended.error) == "no token fits the grammar"
        outputs = [o async for o in engine.generate([1], tokens(2), keep_as=KeepAs("rules"))]
        assert isinstance(outputs[-1].error, OutOfMemoryError)
        assert "rules" in str(outputs[-1].error)
        outputs = [o async for o in engine.generate([OVERLOADED], tokens(2))]
        assert isinstance(outputs[-1].error, OverloadedError)
        assert outputs[-1].error.reason == "queued_tokens"

    drive(side, test)


def test_a_refused_request_harms_no_other(side: Side):
    async def test(engine):
        good = asyncio.ensure_future(collect(engine, [1], tokens(50)))
        with pytest.raises(InvalidRequestError, match="thirteen"):
            await engine.submit([REFUSED], tokens(5))
        with pytest.raises((ZeroDivisionError, EngineProcessError), match="secret"):
            await engine.submit([CRASH_OF_ADD], tokens(5))
        assert await good == list(range(50))
        assert engine.health == "ready"
        assert engine.num_live == 0

    drive(side, test)


def test_leaving_and_cancelling_abort(side: Side):
    async def test(engine):
        async with await engine.submit([1], tokens(10**6), request_id="left") as stream:
            await anext(stream)
        await until(lambda: any(line.startswith("abort left/") for line in side.log()))
        task = asyncio.ensure_future(collect(engine, [1], tokens(10**6)))
        await until(lambda: engine.num_live == 1)
        task.cancel()
        await until(lambda: sum(line.startswith("abort") for line in side.log()) == 2)
        assert engine.num_live == 0

    drive(side, test)


def test_an_abort_by_name_gives_a_last_output(side: Side):
    async def test(engine):
        outputs = []
        async for output in engine.generate([1], tokens(10**6), request_id="mine"):
            if not outputs:
                await engine.abort(["mine"])
            outputs.append(output)
        assert outputs[-1].outputs[0].finish_reason == "abort"

    drive(side, test)


def test_utilities(side: Side):
    utilities = RemotePrefixEngine(side.channel)
    utilities.add_prefix("early", [1, 2], cache_salt="s", text="be brief")  # before the start

    async def test(engine):
        stats = await engine.stats()
        assert stats.steps_by_size == {2: stats.steps}
        assert stats.requests.histograms["request_params_n"].total == 2.0
        assert await engine.call_utility("startup_seconds") == {"weights": 0.25}
        assert await engine.call_utility("kernels") == []
        (prefix,) = await engine.call_utility("prefixes")
        assert (prefix.name, prefix.token_ids, prefix.cache_salt) == ("early", (1, 2), "s")
        assert prefix.text == "be brief"
        (again,) = await asyncio.to_thread(utilities.prefixes)
        assert again == prefix
        with pytest.raises(InvalidRequestError, match="'none'"):
            await asyncio.to_thread(utilities.drop_prefix, "none")
        await engine.call_utility("drop_prefix", "early")
        assert await engine.call_utility("prefixes") == []
        with pytest.raises((ZeroDivisionError, EngineProcessError), match="secret"):
            await engine.call_utility("reset_prefix_cache")
        with pytest.raises(ValueError, match="no utility"):
            await engine.call_utility("step")

    drive(side, test)


def test_facts(side: Side):
    facts = side.channel.facts
    assert (facts.description, facts.vocab_size, facts.num_pages) == ("StubEngine()", 100, 100)
    assert side.channel.tokenizer is None


def test_masks_are_made_beside_the_steps(side: Side):
    def wanted(source: str) -> MaskRequest:
        return MaskRequest(Constraint("regex", source), 2.0, 10)

    async def test(engine):
        side.set("mask_gate", on=True)
        slow = asyncio.ensure_future(engine.submit([1], tokens(2), mask_request=wanted("slow")))
        await asyncio.sleep(0)
        quick = await engine.submit([1], tokens(2), mask_request=wanted("quick"))
        assert not slow.done()
        assert await collect(engine, [1], tokens(5)) == list(range(5))
        assert not slow.done()
        side.set("mask_gate", on=False)
        for stream in (quick, await slow):
            async with stream:
                assert [t async for o in stream for t in o.outputs[0].token_ids] == [0, 1]
        assert "masks slow 2" in side.log()
        with pytest.raises(InvalidRequestError, match="not valid"):
            await engine.submit([1], tokens(2), mask_request=wanted("bad"))
        own = tokens(2, structured_outputs=StructuredOutputsParams(regex="a"))
        assert await collect(engine, [1], own) == [0, 1]
        assert any(
            line.startswith("masks ") and line.endswith(("a inf", " 0")) for line in side.log()
        )

    drive(side, test)


def test_a_request_that_is_aborted_while_its_masks_are_made_is_not_added(side: Side):
    async def test(engine):
        side.set("mask_gate", on=True)
        wanted = MaskRequest(Constraint("regex", "slow"))
        task = asyncio.ensure_future(
            engine.submit([1], tokens(10**6), request_id="early", mask_request=wanted)
        )
        await until(lambda: "begin masks slow" in side.log())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await collect(engine, [1], tokens(3)) == [0, 1, 2]  # the abort came before it
        side.set("mask_gate", on=False)
        await until(lambda: "masks slow inf" in side.log())
        await asyncio.sleep(0.1)
        assert await collect(engine, [1], tokens(3)) == [0, 1, 2]
        assert not any(line.startswith("add early") for line in side.log())

    drive(side, test)


@pytest.mark.sample(1)
def test_health_of_a_long_step(side: Side, monkeypatch):
    def later(seconds: float) -> None:
        """Let the age of a heartbeat be measured with a clock that is ahead."""
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
        monkeypatch.setattr(async_engine, "time", clock)

    async def test(engine):
        await until(lambda: engine.health == "ready")
        side.set("gate", on=True)
        side.set("compiling", on=True)
        task = asyncio.ensure_future(collect(engine, [1], tokens(2)))
        await until(lambda: engine.channel.compile_progress().waiting)
        await until_stuck(engine)
        later(1000.0)
        assert engine.health == "ready"
        progress = engine.channel.compile_progress()
        assert (progress.compiled, progress.total) == (3, 20)
        stats = await engine.stats(0.05)
        assert stats is None or stats.num_running <= 1
        side.set("compiling", on=False)
        await until(lambda: engine.health == "hung")
        assert not task.done()
        later(0.0)
        side.set("gate", on=False)
        assert await task == [0, 1]
        assert engine.health == "ready"

    drive(side, test, heartbeat_seconds=500.0)


def test_drain(side: Side):
    async def test(engine):
        side.set("gate", on=True)
        task = asyncio.ensure_future(collect(engine, [1], tokens(5)))
        await until(lambda: engine.num_live == 1)
        draining = asyncio.ensure_future(engine.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="shutting down"):
            await engine.submit([1], tokens(1))
        side.set("gate", on=False)
        assert await draining
        assert await task == list(range(5))

    drive(side, test)


def test_a_function_needs_the_engine_in_this_process(side: Side):
    async def test(engine):
        if side.process:
            with pytest.raises(RuntimeError, match="another process"):
                await engine.call(lambda inner: inner.steps)
            with pytest.raises(RuntimeError, match="another process"):
                _ = engine.engine
            with pytest.raises(InvalidRequestError, match="masks cannot be sent"):
                await engine.submit([1], tokens(1), masks=[object()])
        else:
            assert await engine.call(lambda inner: inner.steps) == engine.engine.steps
        assert engine.num_live == 0

    drive(side, test)
