"""The items and events that a chat's deltas become, and the store of responses."""

import itertools
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from rjax.outputs import RequestOutput
from rjax.serve.api.chat_parts import ChatDelta
from rjax.serve.api.responses.writer import ResponseWriter
from rjax.serve.parsing.tools.parser import CallDelta
from rjax.serve.protocol.errors import ApiError
from rjax.serve.stores.response_store import ResponseStore, StoredResponse

from .response_stream import COUNT, ResponseStream, new_response


def call_delta(index: int, name: str | None, arguments: str) -> ChatDelta:
    return ChatDelta(0, call=CallDelta(index, arguments, name and f"call_{index}", name))


def test_text_and_several_calls_are_items_in_order():
    made = ResponseStream()
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
        made.feed(delta)
    made.finish("tool_calls")
    events = made.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.get("output_index") for event in events] == (
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
    streamed = ResponseStream()
    while deltas:  # an output may have several
        count = pick.randrange(1, 4)
        streamed.feed(*deltas[:count])
        del deltas[:count]
    streamed.finish("tool_calls")
    whole = ResponseWriter(new_response())
    whole.feed(ChatDelta(0, reasoning=reasoning))
    whole.feed(ChatDelta(0, content=content))
    whole.feed(call_delta(0, "find", arguments))
    whole.finish("tool_calls", COUNT.usage())
    assert without_ids(streamed.response.output) == without_ids(whole.response.output)
    first, message, _ = Response.model_validate_json(streamed.response.model_dump_json()).output
    assert first.type == "reasoning" and first.content is not None
    assert [part.model_dump() for part in first.content] == [
        {"type": "reasoning_text", "text": reasoning}
    ]
    assert (first.status, first.summary, first.id[:3]) == ("completed", [], "rs_")
    assert message.type == "message" and message.content[0].model_dump()["text"] == content
    found = [ANY_EVENT.validate_python(event) for event in streamed.events]
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
    made = ResponseStream()
    made.feed(ChatDelta(0, reasoning="So th"))
    made.feed(ChatDelta(0, content=more))
    made.finish("length")
    [item] = without_ids(made.response.output)
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_answer_of_nothing_is_an_empty_message(text):
    made = ResponseStream()
    made.feed(ChatDelta(0, content=text))
    made.finish("stop")
    assert made.kinds[-1] == "completed"
    [item] = made.response.model_dump()["output"]
    assert item["content"][0]["text"] == text


def test_white_space_before_a_call_is_dropped():
    made = ResponseStream()
    made.feed(ChatDelta(0, content="\n"))
    made.feed(call_delta(0, "find", "{}"))
    made.finish("tool_calls")
    assert [item.type for item in made.response.output] == ["function_call"]


def test_a_cut_call_is_incomplete():
    made = ResponseStream()
    made.feed(call_delta(0, "find", '{"a'))
    made.finish("length")
    assert made.kinds[-1] == "incomplete"
    [item] = made.response.model_dump()["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"a')


def test_a_failed_response_says_why_and_numbers_go_on():
    made = ResponseStream()
    made.feed(ChatDelta(0, content="Let"))
    made.fail(ApiError(500, "the server failed"))
    events = made.events
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the server failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Let"
    assert last["response"]["output"][0]["status"] == "incomplete"
    assert last["response"]["store"] is False
    with pytest.raises(ApiError):
        made.store.find("ann", made.response.id)


def logprobs(text: str, logprob: float, alternatives: int = 2) -> dict[str, Any]:
    """Fields of `ChatLogprobs` of one token."""
    entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
    return {"content": [{**entry, "top_logprobs": [entry] * alternatives}], "refusal": None}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
PIECES = st.tuples(
    st.sampled_from(["reasoning", "text", "logprobs", "call", "arguments"]),
    TEXTS,
    st.floats(-9999, 0),
)


def delta_of(kind: str, text: str, logprob: float, calls: int) -> ChatDelta:
    """A delta; one of a call is of the last one of a number of calls."""
    match kind:
        case "reasoning":
            return ChatDelta(0, reasoning=text)
        case "text":
            return ChatDelta(0, content=text)
        case "logprobs":
            return ChatDelta(0, content=text, logprobs=logprobs(text, logprob))
    return call_delta(calls, (text or "f") if kind == "call" else None, text)


@given(
    st.lists(st.lists(PIECES)),
    st.sampled_from(["stop", "length", "tool_calls", "abort", None]),
    st.booleans(),
)
def test_any_deltas_give_the_events_of_the_models(outputs, reason, large):
    """`ResponseStream` checks each."""
    stream, calls, in_call = ResponseStream(large=large), 0, False
    for pieces in outputs:
        deltas = []
        for kind, text, logprob in pieces:
            if kind == "arguments" and not in_call:
                continue
            calls += kind == "call"
            in_call = kind in ("call", "arguments")
            deltas.append(delta_of(kind, text, logprob, calls))
        stream.feed(*deltas)
    stream.fail(ApiError(400, "é")) if reason is None else stream.finish(reason)
    assert [event["sequence_number"] for event in stream.events] == [*range(len(stream.events))]
    shown = stream.events[-1]["response"]
    assert stream.kinds[-1] == shown["status"] == stream.response.status
    assert shown["output"] == [item.model_dump() for item in stream.response.output]
    if shown["status"] != "failed":
        done = [event["item"] for event in stream.events if event["type"].endswith("item.done")]
        assert done == shown["output"]
        assert json.loads(stream.store.find("ann", stream.response.id).response) == shown


def test_a_response_is_cancelled_while_a_thread_ends_it():
    """The response is then as it has ended."""
    made = ResponseStream()
    made.feed(ChatDelta(0, content="Let"))
    reached, may_go_on = threading.Event(), threading.Event()

    def deltas(output: RequestOutput) -> Iterator[ChatDelta]:
        reached.set()
        assert may_go_on.wait(60)
        yield ChatDelta(0, content=" me", finish_reason="stop")

    made.encoder.builder._parts.deltas = deltas  # pyright: ignore[reportAttributeAccessIssue]
    with ThreadPoolExecutor(2) as threads:
        ending = threads.submit(made.finish, "stop")
        assert reached.wait(60)
        cancelling = threads.submit(made.encoder.builder.cancel)
        early = wait([cancelling], 0.05).done
        may_go_on.set()
        ending.result(60)
        cancelling.result(60)
    assert not early
    assert made.response.status == "completed"
    [item] = without_ids(made.response.output)
    assert item["content"][0]["text"] == "Let me"


def test_a_cancelled_response_has_the_items_so_far():
    made = ResponseStream()
    made.feed(ChatDelta(0, reasoning="So"))
    made.feed(ChatDelta(0, content="Let"))
    made.encoder.builder.cancel()
    made.encoder.store()
    shown = json.loads(made.store.find("ann", made.response.id).response)
    assert shown["status"] == "cancelled"
    assert [item["status"] for item in shown["output"]] == ["completed", "incomplete"]


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
