"""LLM and AsyncLLM that are paused, put to sleep and woken up."""

import asyncio
import contextlib
import pathlib

import pytest

from rjax.api.async_llm import AsyncLLM
from rjax.api.llm import LLM
from rjax.errors import EnginePausedError, EngineSleepingError, InvalidRequestError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams

from .conftest import TINY_OPTIONS

pytestmark = pytest.mark.usefixtures("kept")

PROMPTS = ["Who?", "Where?", "When?", "Why not?"]  # two run at a time
PARAMS = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)
SYSTEM = "Name: Ann Lee, age: 41, country: Peru. "


def generated(llm: LLM) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_streams_are_paused_and_go_on(tiny_llm: LLM, mode) -> None:
    wanted = generated(tiny_llm)
    said: list[list[int]] = [[] for _ in PROMPTS]
    ended: dict[int, str | None] = {}
    with tiny_llm.stream(PROMPTS, PARAMS) as stream:

        def read(output) -> None:
            assert output.prompt_index is not None
            said[output.prompt_index] += output.outputs[0].token_ids
            if output.finished:
                ended[output.prompt_index] = output.outputs[0].finish_reason

        while not (said[0] and said[1]):
            read(next(stream))
        tiny_llm.pause(mode)
        assert tiny_llm.is_paused and not tiny_llm.is_sleeping
        with pytest.raises(EnginePausedError, match="call resume first"):
            tiny_llm.generate("Who?", PARAMS, use_tqdm=False)
        with pytest.raises(EnginePausedError):
            tiny_llm.add_prefix("system", SYSTEM)
        paused = contextlib.suppress(EnginePausedError)  # which leaves the stream open
        with paused if mode != "abort" else contextlib.nullcontext():
            for output in stream:
                read(output)
        if mode == "wait":  # those that ran have finished, the others have not started
            assert ended == {0: "length", 1: "length"}
            assert said[:2] == wanted[:2] and not (said[2] or said[3])
        elif mode == "keep":
            assert not ended
        tiny_llm.resume()
        for output in stream:
            read(output)
    if mode == "abort":
        assert ended == dict.fromkeys(range(4), "abort")
        assert [tokens[: len(s)] for tokens, s in zip(wanted, said, strict=True)] == said
    else:
        assert said == wanted
    assert generated(tiny_llm) == wanted


def test_a_timeout_goes_on_while_paused(tiny_llm: LLM) -> None:
    tiny_llm.pause()
    with tiny_llm.stream("Who?", PARAMS, timeout=0.05) as stream:
        with pytest.raises(EnginePausedError):
            next(stream)
        engine = tiny_llm.engine
        while not engine.has_unfinished_requests():
            pass
        (output,) = stream
    assert output.outputs[0].finish_reason == "abort"
    tiny_llm.resume()


def test_sleep_with_a_system_prompt_and_streams(tiny_llm: LLM) -> None:
    tiny_llm.fill_prefix_kv_cache(SYSTEM)
    tiny_llm.add_prefix("other", SYSTEM.upper())
    wanted = generated(tiny_llm)
    with pytest.raises(InvalidRequestError, match="level is 3; give 1"):
        tiny_llm.sleep(3)
    assert not tiny_llm.is_paused
    stream = tiny_llm.stream(PROMPTS, PARAMS)
    first = next(stream)
    tiny_llm.sleep(mode="keep")
    assert tiny_llm.is_sleeping and tiny_llm.is_paused
    with pytest.raises(EngineSleepingError, match="call wake_up first"):
        tiny_llm.generate("Who?", PARAMS, use_tqdm=False)
    with pytest.raises(EngineSleepingError):
        tiny_llm.resume()
    for tags in (["kv"], "weights"):
        with pytest.raises(InvalidRequestError, match="'weights' and 'kv_cache'"):
            tiny_llm.wake_up(tags)
    tiny_llm.wake_up(["kv_cache"])
    assert tiny_llm.is_sleeping
    tiny_llm.wake_up()
    assert not (tiny_llm.is_sleeping or tiny_llm.is_paused)
    said: dict[int | None, list[int]] = {i: [] for i in range(4)}
    for output in (first, *stream):
        said[output.prompt_index] += output.outputs[0].token_ids
    assert list(said.values()) == wanted
    assert tiny_llm.prefixes() == ["other"]
    (output,) = tiny_llm.generate("Who?", PARAMS, prefix="other", use_tqdm=False)
    assert output.num_cached_tokens and output.num_cached_tokens > 16, "it was filled again"
    # Paused before, paused after.
    tiny_llm.pause()
    tiny_llm.sleep()
    tiny_llm.wake_up()
    assert tiny_llm.is_paused
    tiny_llm.resume()
    tiny_llm.drop_prefix("other")
    tiny_llm.fill_prefix_kv_cache(None)


async def _lives(llm: AsyncLLM) -> None:
    async def answer(prompt: str) -> RequestOutput:
        final = PARAMS.clone()
        final.output_kind = RequestOutputKind.FINAL_ONLY
        (output,) = [o async for o in llm.generate(prompt, final)]
        return output

    async def ask(prompt: str) -> list[int]:
        return (await answer(prompt)).outputs[0].token_ids

    wanted = [await ask(prompt) for prompt in PROMPTS]
    for mode in ("wait", "keep"):
        running = asyncio.ensure_future(anext(aiter(llm.generate(PROMPTS[0], PARAMS))))
        tasks = [asyncio.ensure_future(ask(prompt)) for prompt in PROMPTS]
        await running
        await llm.pause(mode)
        assert await llm.is_paused()
        late = asyncio.ensure_future(ask(PROMPTS[3]))
        done, _ = await asyncio.wait([late], timeout=0.2)
        assert not done, "requests queue while paused"
        await llm.resume()
        assert await asyncio.gather(*tasks, late) == [*wanted, wanted[3]]
    assert not await llm.is_paused()
    await llm.sleep(level=2)
    assert await llm.is_sleeping()
    with pytest.raises(EngineSleepingError):
        await ask(PROMPTS[0])
    await llm.wake_up(["weights"])
    assert await llm.is_sleeping()
    await llm.wake_up(["kv_cache"])
    assert [await ask(prompt) for prompt in PROMPTS] == wanted
    await ask(SYSTEM)
    for clear in (False, True):
        await llm.pause_generation(mode="keep", clear_cache=clear)
        assert await llm.is_paused()
        await llm.resume_generation()
        assert bool((await answer(SYSTEM)).num_cached_tokens) is not clear
    long = SamplingParams(max_tokens=400, seed=5, ignore_eos=True)
    stream = llm.generate(PROMPTS[0], long)
    await anext(stream)
    await llm.pause()
    ended = [output async for output in stream][-1].outputs[0]
    assert ended.finish_reason == "abort"
    assert ended.token_ids[:24] == wanted[0][: len(ended.token_ids)]
    await llm.resume()


@pytest.mark.parametrize("process", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_async_llm_pauses_and_sleeps(tiny_folder: pathlib.Path, process) -> None:
    async def live() -> None:
        async with AsyncLLM(str(tiny_folder), engine_process=process, **TINY_OPTIONS) as llm:
            await _lives(llm)

    asyncio.run(live())
