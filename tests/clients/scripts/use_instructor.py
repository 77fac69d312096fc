"""instructor: a pydantic class by tools, by strict tools, by a JSON schema, and streamed."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field
from tasks import COUNTRY, Asked, is_sentence, run


class Fact(BaseModel):
    sentence: str = Field(pattern=COUNTRY)
    column: Literal["country", "age"]


class Answer(BaseModel):
    """The answer to a question."""

    fact: Fact


def ask(asked: Asked, mode: instructor.Mode) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=120),
        mode=mode,
    )
    found = client.chat.completions.create(
        model=asked.model,
        messages=asked.first_turn,
        response_model=Answer,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    assert is_sentence(found.fact.sentence), found


def by_tools(asked: Asked) -> None:
    ask(asked, instructor.Mode.TOOLS)


def by_strict_tools(asked: Asked) -> None:
    ask(asked, instructor.Mode.TOOLS_STRICT)


def by_json_schema(asked: Asked) -> None:
    ask(asked, instructor.Mode.JSON_SCHEMA)


def partial(asked: Asked) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=120),
        mode=instructor.Mode.TOOLS,
    )
    found = list(
        client.chat.completions.create_partial(
            model=asked.model,
            messages=asked.first_turn,
            response_model=Answer,
            temperature=0,
            max_tokens=200,
            max_retries=0,
        )
    )
    assert is_sentence(found[-1].fact.sentence), found[-1]


def second_turn(asked: Asked) -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=120),
        mode=instructor.Mode.TOOLS,
    )
    found, completion = client.chat.completions.create_with_completion(
        model=asked.model,
        messages=asked.second_turn(asked.country_answer),
        response_model=Answer,
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    assert is_sentence(found.fact.sentence), found
    assert completion.usage.completion_tokens > 4


run(by_tools, by_strict_tools, by_json_schema, partial, second_turn)
