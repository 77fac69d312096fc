"""pydantic-ai: agents that chat, stream, take a second turn, call tools, give structured output."""

import asyncio

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from tasks import COUNTRY, Asked, Column, is_sentence, run


class Fact(BaseModel):
    sentence: str = Field(pattern=COUNTRY)
    column: Column


class Answer(BaseModel):
    """The answer to a question."""

    fact: Fact


def agent(asked: Asked, model: type = OpenAIChatModel, **options: object) -> Agent:
    provider = OpenAIProvider(base_url=f"{asked.url}/v1", api_key="none")
    return Agent(
        model(asked.model, provider=provider),
        system_prompt=asked.system,
        model_settings={"temperature": 0, "max_tokens": 200},
        retries=0,
        **options,
    )


def chat(asked: Asked) -> None:
    found = agent(asked).run_sync(asked.country_question)
    assert found.output == asked.country_answer, found
    assert found.usage.output_tokens > 4


def stream(asked: Asked) -> None:
    async def ask() -> list[str]:
        async with agent(asked).run_stream(asked.country_question) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(ask())
    assert "".join(pieces) == asked.country_answer, pieces
    assert len(pieces) > 1  # one holds the tokens that were ready


def second_turn(asked: Asked) -> None:
    asking = agent(asked)
    first = asking.run_sync(asked.country_question)
    found = asking.run_sync(asked.age_question, message_history=first.all_messages())
    assert found.output == asked.age_answer, found


def tools(asked: Asked) -> None:
    asking = agent(asked)
    calls: list[Fact] = []

    @asking.tool_plain
    def report(fact: Fact) -> str:
        """Report the answer to a question."""
        calls.append(fact)
        return "noted"

    def choice(context: object) -> dict[str, object]:
        return {"tool_choice": "none" if calls else "required", "parallel_tool_calls": False}

    found = asking.run_sync(asked.country_question, model_settings=choice)
    assert len(calls) == 1 and is_sentence(calls[0].sentence)
    assert found.output, found


def structured(asked: Asked) -> None:
    for kind in (Answer, NativeOutput(Answer)):
        found = agent(asked, output_type=kind).run_sync(asked.country_question)
        assert is_sentence(found.output.fact.sentence), (kind, found)


def streamed_structured(asked: Asked) -> None:
    async def ask() -> Answer:
        asking = agent(asked, output_type=Answer)
        async with asking.run_stream(asked.country_question) as result:
            return await result.get_output()

    assert is_sentence(asyncio.run(ask()).fact.sentence)


def responses(asked: Asked) -> None:
    found = agent(asked, OpenAIResponsesModel).run_sync(asked.country_question)
    assert found.output == asked.country_answer, found


run(chat, stream, second_turn, tools, structured, streamed_structured, responses)
