"""openai: chat, streams, a second turn, tools, structured output, completions, responses."""

import asyncio
import json

import openai
from pydantic import BaseModel, Field
from tasks import COUNTRY, Asked, Column, is_sentence, run


class Fact(BaseModel):
    sentence: str = Field(pattern=COUNTRY)
    column: Column


class Answer(BaseModel):
    fact: Fact


class Report(BaseModel):
    """Report the answer to a question."""

    fact: Fact


def connect(asked: Asked) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(asked: Asked) -> None:
    found = connect(asked).chat.completions.create(model=asked.model, messages=asked.first_turn)
    assert found.choices[0].message.content == asked.country_answer, found
    assert found.choices[0].finish_reason == "stop"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens


def stream(asked: Asked) -> None:
    chunks = list(
        connect(asked).chat.completions.create(
            model=asked.model,
            messages=asked.first_turn,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == asked.country_answer, text
    assert len(chunks) > 3  # one delta holds the tokens that were ready
    assert chunks[-1].usage.completion_tokens > 4


def second_turn(asked: Asked) -> None:
    client = connect(asked)
    first = client.chat.completions.create(model=asked.model, messages=asked.first_turn)
    messages = [
        *asked.first_turn,
        first.choices[0].message,
        {"role": "user", "content": asked.age_question},
    ]
    found = client.chat.completions.create(model=asked.model, messages=messages)
    assert found.choices[0].message.content == asked.age_answer, found


def at_once(asked: Asked) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{asked.url}/v1", api_key="none") as client:
            found = await asyncio.gather(
                *(
                    client.chat.completions.create(model=asked.model, messages=asked.first_turn)
                    for _ in range(3)
                )
            )
        return [f.choices[0].message.content for f in found]

    assert asyncio.run(ask()) == [asked.country_answer] * 3


def tools(asked: Asked) -> None:
    client = connect(asked)
    given = {
        "model": asked.model,
        "tools": [openai.pydantic_function_tool(Report)],
        "temperature": 0,
        "max_tokens": 200,
    }
    first = client.chat.completions.create(
        messages=asked.first_turn, tool_choice="required", parallel_tool_calls=False, **given
    ).choices[0]
    assert first.finish_reason == "tool_calls", first
    [call] = first.message.tool_calls
    assert call.function.name == "Report"
    fact = Report.model_validate_json(call.function.arguments).fact
    assert is_sentence(fact.sentence), fact
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"noted": True})}
    final = client.chat.completions.create(
        messages=[*asked.first_turn, first.message, result], tool_choice="none", **given
    ).choices[0]
    assert final.message.content, final
    assert not final.message.tool_calls


def streamed_tools(asked: Asked) -> None:
    with connect(asked).chat.completions.stream(
        model=asked.model,
        messages=asked.first_turn,
        tools=[openai.pydantic_function_tool(Report)],
        tool_choice={"type": "function", "function": {"name": "Report"}},
        temperature=0,
        max_tokens=200,
    ) as events:
        [call] = events.get_final_completion().choices[0].message.tool_calls
    assert is_sentence(call.function.parsed_arguments.fact.sentence), call


def structured(asked: Asked) -> None:
    found = connect(asked).chat.completions.parse(
        model=asked.model,
        messages=asked.first_turn,
        response_format=Answer,
        temperature=0,
        max_tokens=200,
    )
    assert is_sentence(found.choices[0].message.parsed.fact.sentence), found


def completions(asked: Asked) -> None:
    client = connect(asked)
    batch = client.completions.create(
        model=asked.model,
        prompt=["The age of", "The country of"],
        max_tokens=0,
        echo=True,
        logprobs=1,
    )
    assert [c.text for c in batch.choices] == ["The age of", "The country of"]
    for choice in batch.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])


def responses(asked: Asked) -> None:
    client = connect(asked)
    first = client.responses.create(
        model=asked.model, instructions=asked.system, input=asked.country_question
    )
    assert first.output_text == asked.country_answer, first
    events = list(
        client.responses.create(
            model=asked.model, instructions=asked.system, input=asked.country_question, stream=True
        )
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == asked.country_answer
    assert events[-1].type == "response.completed"


run(
    chat,
    stream,
    second_turn,
    at_once,
    tools,
    streamed_tools,
    structured,
    completions,
    responses,
)
