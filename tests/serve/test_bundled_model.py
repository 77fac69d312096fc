"""The bundled model behind the official client: right answers, the table read once for all."""

import asyncio
import json

import openai
import pytest

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.models.tables.demo import demo_questions, demo_system_prompt
from tests.bundled import BUNDLED_SIZES

from .live_server import LiveServer, live_server


@pytest.fixture(scope="module")
def bundled(optimised: None, kept: None):
    engine = build_engine(EngineConfig.from_options({"use_tqdm": False, **BUNDLED_SIZES}))
    with live_server(engine) as found:
        yield found


@pytest.mark.thorough
def test_answers_are_right_and_share_the_table(bundled: LiveServer):
    system = {"role": "system", "content": demo_system_prompt()}
    asked = demo_questions()[:6]

    async def whole() -> list:
        async with openai.AsyncOpenAI(
            base_url=f"{bundled.url}/v1", api_key="none", max_retries=0, timeout=300
        ) as client:

            async def one(question: str) -> object:
                return await client.chat.completions.create(
                    model="tiny", messages=[system, {"role": "user", "content": question}]
                )

            return await asyncio.gather(*(one(question) for question, _ in asked))

    found = asyncio.run(whole())
    right = [
        answer.choices[0].message.content == expected
        for answer, (_, expected) in zip(found, asked, strict=True)
    ]
    assert sum(right) >= 5, [a.choices[0].message.content for a in found]
    prompts = [a.usage.prompt_tokens for a in found]
    cached = sorted(a.usage.prompt_tokens_details.cached_tokens for a in found)
    # One request computes the table, the others find it.
    assert cached[0] < 100
    assert cached[1] > min(prompts) - 200
    stats = bundled.call(lambda engine: engine.stats())
    assert stats.kv_tokens_read < stats.kv_tokens_unshared


@pytest.mark.slow
def test_forced_form_does_not_hurt_a_right_answer(bundled: LiveServer):
    with openai.OpenAI(
        base_url=f"{bundled.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        question, expected = demo_questions()[0]
        messages = [
            {"role": "system", "content": demo_system_prompt()},
            {"role": "user", "content": question},
        ]
        wrong = [text for _, text in demo_questions()[1:6] if text != expected]
        found = client.chat.completions.create(
            model="tiny",
            messages=messages,
            extra_body={"structured_outputs": {"choice": [*wrong, expected]}},
        )
        assert found.choices[0].message.content == expected
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        formed = client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=60,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
            },
        )
        if formed.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(formed.choices[0].message.content)["age"], int)
