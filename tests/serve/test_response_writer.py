"""The items and events that a chat's deltas become, and the store of responses."""

import itertools
import random
from typing import Any

import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from rjax.serve.api.chat_parts import ChatDelta
from rjax.serve.api.chunks import UsageCounter
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses_api_models import ResponsesResponse
from rjax.serve.stores.response_store import ResponseStore, StoredResponse


def writer() -> ResponseWriter:
    rest: dict[str, Any] = dict.fromkeys(
        ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key",
         "safety_identifier", "user")
    )  # fmt: skip
    return ResponseWriter(
        ResponsesResponse(
            id="resp_1", created_at=0, status="in_progress", metadata={}, model="tiny", output=[],
            parallel_tool_calls=True, reasoning={}, store=True, temperature=1, text={},
            tool_choice="auto", tools=[], top_logprobs=0, top_p=1, **rest,
        )
    )  # fmt: skip


COUNT = UsageCounter()
COUNT.add(0, prompt_tokens=1, cached=0, generated=3)
USAGE = COUNT.usage(reasoning=2)


def call_delta(index: int, name: str | None, arguments: str) -> ChatDelta:
    return ChatDelta(0, call=CallDelta(index, arguments, name and f"call_{index}", name))


def test_text_and_several_calls_are_items_in_order():
    made = writer()
    events = made.begin()
    for delta in (
        ChatDelta(0, begins=True),
        ChatDelta(0, content=" \n"),
        ChatDelta(0, content="Let me see."),
        call_delta(0, "find", ""),
        call_delta(0, None, '{"age":'),
        call_delta(0, None, "7}"),
        call_delta(1, "count", "{}"),
        ChatDelta(0, content="\n"),
    ):
        events += made.feed(delta)
    events += made.finish("tool_calls", USAGE)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [getattr(event, "output_index", None) for event in events] == (
        [None] * 2 + [0] * 6 + [1] * 5 + [2] * 4 + [None]
    )
    found = [item.model_dump() for item in made.response.output]
    assert [item["type"] for item in found] == ["message", "function_call", "function_call"]
    assert found[0]["content"][0]["text"] == " \nLet me see."
    assert [item["arguments"] for item in found[1:]] == ['{"age":7}', "{}"]
    assert {item["status"] for item in found} == {"completed"}


ANY_EVENT = pydantic.TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)


def cut(text: str, pick: random.Random) -> list[str]:
    """The text in pieces."""
    ends = sorted({pick.randrange(len(text)) for _ in range(pick.randrange(6))} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def without_ids(items: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in items]


@pytest.mark.parametrize("seed", range(20))
def test_reasoning_text_and_calls_are_the_same_however_they_are_cut(seed):
    pick = random.Random(seed)
    reasoning, content, arguments = "So \n\nthey ask. ", "\n\nLet me see.", '{"age": 7}'
    deltas = [ChatDelta(0, begins=True)]
    deltas += [ChatDelta(0, reasoning=piece) for piece in cut(reasoning, pick)]
    deltas += [ChatDelta(0, content=piece) for piece in cut(content, pick)]
    deltas.append(call_delta(0, "find", ""))
    deltas += [call_delta(0, None, piece) for piece in cut(arguments, pick)]
    streamed, whole = writer(), writer()
    events = streamed.begin()
    for delta in deltas:
        events += streamed.feed(delta)
    events += streamed.finish("tool_calls", USAGE)
    whole.feed(ChatDelta(0, reasoning=reasoning))
    whole.feed(ChatDelta(0, content=content))
    whole.feed(call_delta(0, "find", arguments))
    whole.finish("tool_calls", USAGE)
    assert without_ids(streamed.response.output) == without_ids(whole.response.output)
    first, message, _ = Response.model_validate_json(streamed.response.model_dump_json()).output
    assert first.type == "reasoning" and first.content is not None
    assert [part.model_dump() for part in first.content] == [
        {"type": "reasoning_text", "text": reasoning}
    ]
    assert (first.status, first.summary, first.id[:3]) == ("completed", [], "rs_")
    assert message.type == "message" and message.content[0].model_dump()["text"] == content
    found = [ANY_EVENT.validate_json(event.model_dump_json()) for event in events]
    assert [type(event).__name__ for event in found[2:4]] == [
        "ResponseOutputItemAddedEvent",
        "ResponseContentPartAddedEvent",
    ]
    kinds = [event.type.removeprefix("response.") for event in found]
    end = kinds.index("reasoning_text.done")
    assert set(kinds[4:end]) == {"reasoning_text.delta"}
    assert kinds[end : end + 4] == [
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    told = [event.model_dump() for event in found]
    assert "".join(event["delta"] for event in told[4:end]) == reasoning == told[end]["text"]
    assert told[3]["part"] == {"type": "reasoning_text", "text": ""}
    assert told[end + 1]["part"] == {"type": "reasoning_text", "text": reasoning}
    assert {event["item_id"] for event in told[3 : end + 2]} == {first.id}


@pytest.mark.parametrize("more", ["", " \n"])
def test_reasoning_that_is_cut_off_has_no_message(more):
    made = writer()
    made.feed(ChatDelta(0, reasoning="So th"))
    made.feed(ChatDelta(0, content=more))
    made.finish("length", USAGE)
    [item] = without_ids(made.response.output)
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_answer_of_nothing_is_an_empty_message(text):
    made = writer()
    made.begin()
    made.feed(ChatDelta(0, content=text))
    events = made.finish("stop", USAGE)
    assert [event.type for event in events][-1] == "response.completed"
    [item] = made.response.model_dump()["output"]
    assert item["content"][0]["text"] == text


def test_white_space_before_a_call_is_dropped():
    made = writer()
    made.feed(ChatDelta(0, content="\n"))
    made.feed(call_delta(0, "find", "{}"))
    made.finish("tool_calls", USAGE)
    assert [item.type for item in made.response.output] == ["function_call"]


def test_a_cut_call_is_incomplete():
    made = writer()
    made.feed(call_delta(0, "find", '{"a'))
    events = made.finish("length", USAGE)
    assert events[-1].type == "response.incomplete"
    [item] = made.response.model_dump()["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a')


def test_a_failed_response_says_why_and_numbers_go_on():
    made = writer()
    events = made.begin() + made.feed(ChatDelta(0, content="Let"))
    events += made.fail(ApiError(500, "the server failed"))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].model_dump()
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the server failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Let"
    assert last["response"]["output"][0]["status"] == "incomplete"


def test_the_store_counts_numbers_and_bytes():
    store = ResponseStore(3, 100)
    for i in range(5):
        store.add("ann", StoredResponse(f"r{i}", b"x" * 20, b"y" * 10))
    with pytest.raises(ApiError, match="made room"):
        store.find("ann", "r1")
    assert store.find("ann", "r2").size == 30
    store.add("ann", StoredResponse("large", b"x" * 60, b""))
    with pytest.raises(ApiError):
        store.find("ann", "r3")
    store.find("ann", "r4")
    store.drop("ann", "large")
    store.add("ann", StoredResponse("next", b"x" * 70, b""))
    store.find("ann", "r4")
    assert not store.has_room(101)
