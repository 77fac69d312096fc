"""langchain-openai: chat, streams, a second turn, tools, structured output, completions."""

from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from tasks import COUNTRY, Asked, Column, is_sentence, run


class Fact(BaseModel):
    sentence: str = Field(pattern=COUNTRY)
    column: Column


class Answer(BaseModel):
    """The answer to a question."""

    fact: Fact


@tool
def report(fact: Fact) -> str:
    """Report the answer to a question."""
    return f"noted: {fact.sentence}"


def connect(asked: Asked, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{asked.url}/v1",
        api_key="none",
        model=asked.model,
        temperature=0,
        max_tokens=200,
        max_retries=0,
        timeout=120,
        **options,
    )


def first_turn(asked: Asked) -> list[object]:
    return [SystemMessage(asked.system), HumanMessage(asked.country_question)]


def chat(asked: Asked) -> None:
    found = connect(asked).invoke(first_turn(asked))
    assert found.content == asked.country_answer, found
    assert found.usage_metadata["output_tokens"] > 4


def stream(asked: Asked) -> None:
    chunks = list(connect(asked, stream_usage=True).stream(first_turn(asked)))
    assert "".join(c.content for c in chunks) == asked.country_answer
    assert len(chunks) > 2  # one holds the tokens that were ready
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 4


def second_turn(asked: Asked) -> None:
    model = connect(asked)
    messages = first_turn(asked)
    found = model.invoke([*messages, model.invoke(messages), HumanMessage(asked.age_question)])
    assert found.content == asked.age_answer, found


def tools(asked: Asked) -> None:
    model = connect(asked)
    messages = first_turn(asked)
    call = model.bind_tools([report], tool_choice="any", parallel_tool_calls=False).invoke(messages)
    [wanted] = call.tool_calls
    assert wanted["name"] == "report"
    sentence = wanted["args"]["fact"]["sentence"]
    assert is_sentence(sentence), wanted
    result = report.invoke(wanted)
    assert isinstance(result, ToolMessage)
    assert result.content == f"noted: {sentence}"
    final = model.bind_tools([report], tool_choice="none").invoke([*messages, call, result])
    assert final.content, final


def streamed_tools(asked: Asked) -> None:
    model = connect(asked).bind_tools([report], tool_choice="report", strict=True)
    whole = None
    for chunk in model.stream(first_turn(asked)):
        whole = chunk if whole is None else whole + chunk
    [wanted] = whole.tool_calls
    assert is_sentence(wanted["args"]["fact"]["sentence"]), wanted


def structured(asked: Asked) -> None:
    for method in ("json_schema", "function_calling"):
        found = connect(asked).with_structured_output(Answer, method=method)
        answer = found.invoke(first_turn(asked))
        assert is_sentence(answer.fact.sentence), (method, answer)


def completions(asked: Asked) -> None:
    model = OpenAI(
        base_url=f"{asked.url}/v1", api_key="none", model=asked.model, temperature=0, max_tokens=4
    )
    found = model.generate(["The age of", "The country of"])
    assert all(texts[0].text for texts in found.generations), found
    assert "".join(model.stream("The age of")) == found.generations[0][0].text


run(chat, stream, second_turn, tools, streamed_tools, structured, completions)
