"""LLM.stream: increments add up to generate's outputs, and leaving it aborts its requests."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rjax.api.beam_search import BeamSearchParams
from rjax.api.llm import LLM
from rjax.errors import EngineClosedError, InvalidRequestError
from rjax.outputs import RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams, StructuredOutputsParams

PROMPTS = ["Who lives here?", "Where?", "When will it be?"]
SEEDED = SamplingParams(max_tokens=12, seed=5, n=2)
LONG = SamplingParams(max_tokens=200, seed=5, ignore_eos=True)


def added_up(chunks: Iterable[RequestOutput]) -> dict[int, list[tuple[Any, ...]]]:
    """Text, tokens and end of each sample of each prompt."""
    found: dict[int, dict[int, list[Any]]] = defaultdict(dict)
    for chunk in chunks:
        for new in chunk.outputs:
            sample = found[chunk.prompt_index].setdefault(new.index, ["", [], None])
            sample[0] += new.text
            sample[1] += new.token_ids
            sample[2] = new.finish_reason
    return {i: [tuple(by[k]) for k in sorted(by)] for i, by in found.items()}


def whole(outputs: list[RequestOutput]) -> dict[int, list[tuple[Any, ...]]]:
    return added_up(outputs)


def generate(llm: LLM, *given: Any) -> list[RequestOutput]:
    return llm.generate(*given, use_tqdm=False)


def idle(llm: LLM) -> bool:
    """Whether no request is left; an abort has a last word, which a step tells."""
    for _ in range(3):
        if llm.engine.has_unfinished_requests():
            llm.engine.step()
    return not llm.engine.has_unfinished_requests()


def test_increments_add_up_to_whole_outputs(tiny_llm: LLM) -> None:
    chunks = list(tiny_llm.stream(PROMPTS, SEEDED))
    want = whole(generate(tiny_llm, PROMPTS, SEEDED))
    assert added_up(chunks) == want
    assert len(chunks) > 3 * len(PROMPTS)
    assert sum(chunk.finished for chunk in chunks) == len(PROMPTS)
    assert {chunk.prompt for chunk in chunks} == set(PROMPTS)


def test_chats_and_constraints_are_streamed(tiny_llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    wanted = StructuredOutputsParams(choice=["red blue green"])
    params = SamplingParams(max_tokens=40, structured_outputs=wanted)
    chunks = list(tiny_llm.stream_chat(talk, params))
    assert len(chunks) > 2
    assert "".join(chunk.outputs[0].text for chunk in chunks) == "red blue green"


def test_streams_and_calls_share_the_engine(tiny_llm: LLM) -> None:
    want = whole(generate(tiny_llm, PROMPTS, SEEDED))
    first, second = (tiny_llm.stream(PROMPTS, SEEDED) for _ in range(2))
    chunks, others = [], []
    for chunk in first:
        chunks.append(chunk)
        others += [other for _, other in zip(range(2), second, strict=False)]
        if len(chunks) == 2:
            assert whole(generate(tiny_llm, PROMPTS, SEEDED)) == want
            tiny_llm.beam_search("Who?", BeamSearchParams(beam_width=2, max_tokens=2))
            tiny_llm.add_prefix("rules", "Be brief, and say what is true. ")
            tiny_llm.drop_prefix("rules")
    assert added_up(chunks) == want
    assert added_up([*others, *second]) == want


@pytest.mark.usefixtures("collector_off")
def test_leaving_the_loop_aborts(tiny_llm: LLM) -> None:
    for _ in tiny_llm.stream(PROMPTS, LONG):
        break
    assert idle(tiny_llm)
    with tiny_llm.stream(PROMPTS, LONG) as chunks:
        next(chunks)
    assert next(chunks, None) is None
    assert idle(tiny_llm)
    chunks = tiny_llm.stream(PROMPTS, LONG)
    chunks.close()
    chunks.close()
    assert list(chunks) == []
    assert idle(tiny_llm)


@pytest.mark.usefixtures("collector_off")
def test_a_stream_dropped_inside_a_call_ends_with_its_next_step(tiny_llm: LLM) -> None:
    held = [tiny_llm.stream("Who?", LONG)]
    next(held[0])

    def bar(**options: Any) -> Any:  # called in the middle of generate
        held.clear()
        return None

    llm_params = SamplingParams(max_tokens=4)
    tiny_llm.generate("Where?", llm_params, use_tqdm=bar)
    assert not held
    assert idle(tiny_llm)


def test_threads_stream_side_by_side(tiny_llm: LLM) -> None:
    want = whole(generate(tiny_llm, PROMPTS, SEEDED))
    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(lambda: list(tiny_llm.stream(PROMPTS, SEEDED))) for _ in range(2)]
        calls = pool.submit(generate, tiny_llm, PROMPTS, SEEDED)
        assert [added_up(stream.result()) for stream in streams] == [want, want]
        assert whole(calls.result()) == want


def test_refused_prompts_and_parameters(tiny_llm: LLM) -> None:
    chunks = list(tiny_llm.stream(["good", [], [10**6]], SamplingParams(max_tokens=2)))
    errors = {chunk.prompt_index: chunk.error for chunk in chunks if chunk.finished}
    assert errors[0] is None
    assert all(isinstance(errors[i], InvalidRequestError) for i in (1, 2))
    final = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY)
    for bad, params in (([], None), ("a", final), ("a", SamplingParams(best_of=2))):
        with pytest.raises(InvalidRequestError):
            tiny_llm.stream(bad, params)
    assert idle(tiny_llm)


def test_close_ends_open_streams(tiny_llm: LLM) -> None:
    engine = tiny_llm.engine
    with LLM.from_engine(engine) as llm:
        chunks = llm.stream(PROMPTS, LONG)
        next(chunks)
        done = llm.stream("a", SamplingParams(max_tokens=1))
        assert len(list(done)) == 1
    assert idle(tiny_llm)
    with pytest.raises(EngineClosedError, match="this LLM is closed"):
        next(chunks)
    assert next(done, None) is None
    chunks.close()


def test_asyncio_may_read_a_stream_on_a_thread(tiny_llm: LLM) -> None:
    async def read() -> list[RequestOutput]:
        chunks = tiny_llm.stream(PROMPTS, SEEDED)
        found = []
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            found.append(chunk)
        return found

    assert added_up(asyncio.run(read())) == whole(generate(tiny_llm, PROMPTS, SEEDED))
