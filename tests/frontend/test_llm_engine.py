"""LLMEngine: requests that are added one by one, as in vLLM's scripts."""

import pathlib
from collections.abc import Iterator

import pytest

from rjax import EngineArgs, InvalidRequestError, LLMEngine, RequestOutputKind, SamplingParams

from .conftest import TINY_OPTIONS, kept_programs

PROMPTS = ["Who?", "Why is that so?", {"prompt_token_ids": [5, 6, 7]}]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, logprobs=1),
    SamplingParams(seed=3, max_tokens=7, n=2),
    SamplingParams(temperature=0, max_tokens=5, output_kind=RequestOutputKind.FINAL_ONLY),
]


@pytest.fixture(scope="module")
def engine(tiny_folder: pathlib.Path) -> Iterator[LLMEngine]:
    with kept_programs():
        made = LLMEngine.from_engine_args(EngineArgs(model=str(tiny_folder), **TINY_OPTIONS))
    with made:
        yield made


def test_its_outputs_are_those_of_generate(engine):
    wanted = engine.generate(PROMPTS, PARAMS)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(f"mine {number}", prompt, params)
    done, texts = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            before = texts.get(output.request_id, "")
            texts[output.request_id] = output.outputs[0].text
            assert texts[output.request_id].startswith(before), "cumulative by default"
            if output.finished:
                done[output.request_id] = output
    assert engine.step() == []
    for number, want in enumerate(wanted):
        found = done[f"mine {number}"]
        assert (found.prompt, found.prompt_token_ids) == (want.prompt, want.prompt_token_ids)
        assert [one.token_ids for one in found.outputs] == [one.token_ids for one in want.outputs]
        assert [one.text for one in found.outputs] == [one.text for one in want.outputs]
    pairs = zip(done["mine 0"].outputs[0].logprobs, wanted[0].outputs[0].logprobs, strict=True)
    for found, want in pairs:
        assert {token: one.logprob for token, one in found.items()} == pytest.approx(
            {token: one.logprob for token, one in want.items()}, abs=1e-4
        )


@pytest.mark.parametrize("names", ["a", ["a"], ["unknown", "a"]])
def test_an_aborted_request_is_gone(engine, names):
    engine.add_request("a", "Who?", SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        assert all(output.finished for output in engine.step())
    engine.add_request("a", "Who?", SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()


def test_what_it_refuses(engine, tiny_folder):
    params = SamplingParams(max_tokens=1)
    with pytest.raises(InvalidRequestError, match="adapters are not supported"):
        engine.add_request("a", "Who?", params, lora_request=object())
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        engine.add_request("a", [5] * 1000, params)
    engine.add_request("a", "Who?", params, lora_request=None, arrival_time=1.0)
    with pytest.raises(InvalidRequestError, match="'a'"):
        engine.add_request("a", "Who?", params)
    while engine.has_unfinished_requests():
        engine.step()
    with pytest.raises(InvalidRequestError, match=r"stats\(\) has the figures"):
        LLMEngine.from_engine_args(EngineArgs(model=str(tiny_folder)), stat_loggers=[object()])
