"""Structured output offline is the server's: the same texts for the same requests."""

from pathlib import Path
from typing import Any

import openai
import pytest

from rjax.api.llm import LLM
from rjax.sampling import SamplingParams, StructuredOutputsParams

from .live_server import OPTIONS
from .test_four_ways import SCHEMA

WANTED: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": "[a-f]{9}"},
    {"choice": ["red", "blue", 'say "no"']},
    {"grammar": 'start: "a" ("b" | "c")+ "d"'},
]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.mark.thorough
def test_texts_are_those_of_the_server(client: openai.OpenAI, llm: LLM):
    options: dict[str, Any] = {"max_tokens": 24, "seed": 5, "temperature": 0.8, "n": 2}
    params = [
        SamplingParams(**options, structured_outputs=StructuredOutputsParams(**wanted))
        for wanted in WANTED
    ]
    found = llm.generate(["Who?"] * len(WANTED), params, use_tqdm=False)
    for wanted, output in zip(WANTED, found, strict=True):
        answer = client.completions.create(
            model="tiny", prompt="Who?", extra_body={"structured_outputs": wanted}, **options
        )
        want = [(choice.text, choice.finish_reason) for choice in answer.choices]
        assert [(c.text, c.finish_reason) for c in output.outputs] == want


def test_both_refuse_what_no_text_can_match(client: openai.OpenAI, llm: LLM):
    for wanted in ({"regex": "("}, {"json": {"type": 5}}, {"grammar": "start: nothing"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(
                model="tiny", prompt="Who?", extra_body={"structured_outputs": wanted}
            )
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
        (_, output) = llm.generate(["a", "b"], [SamplingParams(), params], use_tqdm=False)
        assert "is not valid" in str(refused.value)
        assert str(output.error).removeprefix("prompts[1]: ") in str(refused.value)
