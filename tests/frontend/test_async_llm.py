"""AsyncLLM: vLLM's names over an engine on a thread of its own."""

import asyncio
import contextlib
import pathlib
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rjax.api.async_llm import AsyncLLM
from rjax.api.llm import LLM
from rjax.errors import EngineClosedError, InvalidConfigError, InvalidRequestError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tests.slow_steps import slow_steps

from .conftest import TINY_OPTIONS

pytestmark = pytest.mark.usefixtures("kept")

SEEDED = SamplingParams(max_tokens=12, seed=5, n=2)
LONG = SamplingParams(max_tokens=200, seed=5, ignore_eos=True)
DELTA = RequestOutputKind.DELTA


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    found = [output async for output in outputs]
    assert [output.finished for output in found] == [False] * (len(found) - 1) + [True]
    return found[-1]


def texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


@contextlib.contextmanager
def over(llm: LLM) -> Iterator[AsyncLLM]:
    """An AsyncLLM over the engine of another test's LLM, closed at the end."""
    served = AsyncLLM.from_engine(llm.engine)
    yield served
    served.shutdown()
    assert repr(served) == "AsyncLLM(closed)"
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.thorough
def test_requests_of_many_tasks_get_the_answers_of_llm(tiny_llm: LLM) -> None:
    prompts: list[Any] = ["Who?", [5, 6, 7], {"prompt": "Where?"}]
    wanted = StructuredOutputsParams(regex="[ab]{5}")
    masked = SamplingParams(max_tokens=20, seed=2, structured_outputs=wanted)
    want = [texts(o) for o in tiny_llm.generate(prompts, SEEDED, use_tqdm=False)]
    (want_masked,) = tiny_llm.generate("Who?", masked, use_tqdm=False)
    talk = [{"role": "user", "content": "Hello"}]
    (want_chat,) = tiny_llm.chat(talk, SEEDED, use_tqdm=False)

    async def ask(llm: AsyncLLM) -> None:
        asked = [last(llm.generate(prompt, SEEDED)) for prompt in prompts]
        more = last(llm.generate("Who?", masked)), last(llm.chat(talk, SEEDED))
        *found, constrained, chatted = await asyncio.gather(*asked, *more)
        assert [texts(output) for output in found] == want
        assert texts(constrained) == texts(want_masked)
        assert texts(chatted) == texts(want_chat)
        assert (await llm.stats()).output_tokens > 0
        streamed = SamplingParams(max_tokens=12, seed=5, n=2, output_kind=DELTA)
        with slow_steps(tiny_llm.engine, 0.02):
            pieces = [o async for o in llm.generate("Who?", streamed)]
        assert len(pieces) > 2
        assert ["".join(p.outputs[i].text for p in pieces) for i in range(2)] == want[0]

    with over(tiny_llm) as llm:
        asyncio.run(ask(llm))


def test_abort_and_leaving_end_a_request(tiny_llm: LLM) -> None:
    async def ask(llm: AsyncLLM) -> None:
        found = []
        async for output in llm.generate("Who?", LONG, "mine"):
            if not found:
                with pytest.raises(InvalidRequestError, match="'mine' is in use"):
                    await last(llm.generate("Where?", LONG, "mine"))
                await llm.abort(["mine", "unknown"])
            found.append(output)
        assert found[-1].request_id == "mine"
        assert found[-1].outputs[0].finish_reason == "abort"
        assert len(found[-1].outputs[0].token_ids) < 200
        async for _ in llm.generate("Who?", LONG):
            break
        reader = asyncio.ensure_future(last(llm.generate("Who?", LONG)))
        await asyncio.sleep(0.05)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        while await llm.call(lambda engine: engine.has_unfinished_requests()):
            await asyncio.sleep(0.01)

    with over(tiny_llm) as llm, slow_steps(tiny_llm.engine, 0.02):
        asyncio.run(ask(llm))


def test_refusals_harm_no_other(tiny_llm: LLM) -> None:
    async def ask(llm: AsyncLLM) -> None:
        bad = StructuredOutputsParams(regex="(")
        asked = [
            last(llm.generate([], SEEDED)),
            last(llm.generate([10**6], SEEDED)),
            last(llm.generate("a", SEEDED, prefix="unknown")),
            last(llm.generate("a", SamplingParams(structured_outputs=bad))),
            last(llm.chat([], SEEDED)),
        ]
        *found, good = await asyncio.gather(
            *asked, last(llm.generate("a", SEEDED)), return_exceptions=True
        )
        assert [type(error) for error in found] == [InvalidRequestError] * len(asked)
        assert isinstance(good, RequestOutput)

    with over(tiny_llm) as llm:
        asyncio.run(ask(llm))
        with pytest.raises(RuntimeError, match="another event loop"):
            asyncio.run(llm.stats())
    with pytest.raises(InvalidConfigError, match="nearest"):
        AsyncLLM(max_model_length=3)


@pytest.mark.usefixtures("collector_off")
def test_dropping_it_ends_its_thread(tiny_llm: LLM) -> None:
    async def use() -> Any:
        llm = AsyncLLM.from_engine(tiny_llm.engine)
        await last(llm.generate("Who?", SEEDED))
        return llm._served.channel.thread

    thread = asyncio.run(use())
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.thorough
@pytest.mark.usefixtures("collector_off")
def test_its_own_engine_goes_with_it(tiny_folder: pathlib.Path) -> None:
    async def use(stack: contextlib.ExitStack) -> Any:
        async with AsyncLLM(str(tiny_folder), **TINY_OPTIONS, sys_prompt="Be brief. ") as llm:
            assert str(tiny_folder) in repr(llm)
            assert llm.get_tokenizer().encode("a")
            await llm.add_prefix("rules", "Say what is true. ")
            output = await last(llm.generate("Who?", SEEDED, prefix="rules", timeout=60))
            assert (output.prompt_token_ids[0], output.num_cached_tokens > 0) == (0, True)
            await llm.drop_prefix("rules")
            stack.enter_context(slow_steps(llm._engine, 0.02))
            reader = asyncio.ensure_future(last(llm.generate("Who?", LONG)))
            await asyncio.sleep(0.05)
            watched = weakref.ref(llm._engine._worker)
        with pytest.raises(EngineClosedError, match="this AsyncLLM"):
            await reader
        for use in (llm.stats(), last(llm.generate("a")), llm.abort("a"), llm.__aenter__()):
            with pytest.raises(EngineClosedError, match="closed"):
                await use
        await llm.close()
        llm.shutdown()
        return watched

    with contextlib.ExitStack() as stack:
        watched = asyncio.run(use(stack))
    assert watched() is None


@pytest.mark.slow
def test_an_engine_in_a_process(
    tiny_llm: LLM, tiny_folder: pathlib.Path, tmp_path: pathlib.Path, monkeypatch, request
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(request.config.cache.mkdir("jax")))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    wanted = StructuredOutputsParams(regex="[ab]{5}")
    masked = SamplingParams(max_tokens=20, seed=2, structured_outputs=wanted)
    (want,) = tiny_llm.generate("Who?", SEEDED, use_tqdm=False)
    (want_masked,) = tiny_llm.generate("Who?", masked, use_tqdm=False)
    saved = tmp_path / "rules.safetensors"
    tiny_llm.add_prefix("saved", "Say what is true. ")
    tiny_llm.save_prefix("saved", saved)
    tiny_llm.drop_prefix("saved")

    async def use() -> None:
        async with AsyncLLM(str(tiny_folder), engine_process=True, **TINY_OPTIONS) as llm:
            assert str(tiny_folder) in repr(llm)
            assert llm.get_tokenizer().encode("a")
            found, constrained = await asyncio.gather(
                last(llm.generate("Who?", SEEDED)), last(llm.generate("Who?", masked))
            )
            assert (texts(found), texts(constrained)) == (texts(want), texts(want_masked))
            assert found.prompt == "Who?"
            assert found.prompt_token_ids == want.prompt_token_ids
            await llm.add_prefix("rules", "Say what is true. ")
            output = await last(llm.generate("Who?", SEEDED, prefix="rules", timeout=60))
            assert (output.prompt_token_ids[0], output.num_cached_tokens > 0) == (0, True)
            await llm.save_prefix("rules", tmp_path / "own.safetensors")
            await llm.drop_prefix("rules")
            assert await llm.load_prefix(saved, "loaded") == "loaded"
            assert await llm.load_prefix(tmp_path / "own.safetensors", "again") == "again"
            assert await llm.prefixes() == ["loaded", "again"]
            with pytest.raises(InvalidRequestError, match="no prefix is named 'rules'"):
                await last(llm.generate("a", SEEDED, prefix="rules"))
            await llm.fill_prefix_kv_cache("Be brief. ")
            await llm.reset_prefix_cache()
            assert (await llm.stats()).output_tokens > 0
            with pytest.raises(RuntimeError, match="another process"):
                await llm.call(lambda engine: engine.stats())
            reader = asyncio.ensure_future(last(llm.generate("Who?", LONG, "mine")))
            await asyncio.sleep(0.05)
            await llm.abort("mine")
            assert (await reader).outputs[0].finish_reason == "abort"
            reader = asyncio.ensure_future(last(llm.generate("Who?", LONG)))
            await asyncio.sleep(0.05)
            process = llm._served.channel.process
        with pytest.raises(EngineClosedError, match="this AsyncLLM"):
            await reader
        assert process.returncode == 0

    asyncio.run(use())


@pytest.mark.thorough
def test_what_an_engine_process_refuses(tiny_folder: pathlib.Path) -> None:
    options = {**TINY_OPTIONS, "engine_process": True}
    with pytest.raises(InvalidConfigError, match="max_model_len is 10000000"):
        AsyncLLM(str(tiny_folder), **options, max_model_len=10**7)
    with pytest.raises(InvalidConfigError, match="cannot be sent to another process"):
        AsyncLLM(str(tiny_folder), **options, tokenizer=object())
