"""litellm: chat, streams, a second turn, tools, structured output, text completions."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or the import asks the network for prices

import litellm
from pydantic import BaseModel, Field
from tasks import COUNTRY, Asked, Column, is_sentence, run


class Fact(BaseModel):
    sentence: str = Field(pattern=COUNTRY)
    column: Column


class Answer(BaseModel):
    fact: Fact


def arguments(asked: Asked) -> dict[str, object]:
    return {
        "model": f"openai/{asked.model}",
        "api_base": f"{asked.url}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_tokens": 200,
        "num_retries": 0,
        "timeout": 120,
    }


def chat(asked: Asked) -> None:
    found = litellm.completion(messages=asked.first_turn, **arguments(asked))
    assert found.choices[0].message.content == asked.country_answer, found
    assert found.usage.completion_tokens > 4


def stream(asked: Asked) -> None:
    chunks = list(
        litellm.completion(
            messages=asked.first_turn,
            stream=True,
            stream_options={"include_usage": True},
            **arguments(asked),
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == asked.country_answer, text
    whole = litellm.stream_chunk_builder(chunks, messages=asked.first_turn)
    assert whole.choices[0].message.content == asked.country_answer, whole
    assert whole.usage.completion_tokens > 4


def second_turn(asked: Asked) -> None:
    first = litellm.completion(messages=asked.first_turn, **arguments(asked))
    messages = [
        *asked.first_turn,
        first.choices[0].message,
        {"role": "user", "content": asked.age_question},
    ]
    found = litellm.completion(messages=messages, **arguments(asked))
    assert found.choices[0].message.content == asked.age_answer, found


def tools(asked: Asked) -> None:
    function = {
        "name": "report",
        "description": "Report the answer to a question.",
        "parameters": Answer.model_json_schema(),
    }
    given = {"tools": [{"type": "function", "function": function}], **arguments(asked)}
    first = litellm.completion(messages=asked.first_turn, tool_choice="required", **given)
    assert first.choices[0].finish_reason == "tool_calls", first
    message = first.choices[0].message
    found = Answer.model_validate_json(message.tool_calls[0].function.arguments)
    assert is_sentence(found.fact.sentence), found
    results = [
        {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": "noted"}
        for call in message.tool_calls
    ]
    final = litellm.completion(
        messages=[*asked.first_turn, message, *results], tool_choice="none", **given
    )
    assert final.choices[0].message.content, final


def structured(asked: Asked) -> None:
    found = litellm.completion(
        messages=asked.first_turn, response_format=Answer, **arguments(asked)
    )
    answer = Answer.model_validate_json(found.choices[0].message.content)
    assert is_sentence(answer.fact.sentence), found


def completions(asked: Asked) -> None:
    given = arguments(asked) | {"model": f"text-completion-openai/{asked.model}", "max_tokens": 4}
    found = litellm.text_completion(prompt=["The age of", "The country of"], **given)
    assert [c.index for c in found.choices] == [0, 1], found
    assert all(c.text for c in found.choices), found
    assert found.usage.completion_tokens == 8


run(chat, stream, second_turn, tools, structured, completions)
