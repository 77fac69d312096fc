"""/v1/responses, driven by the official client: items, streams, tools, stored responses."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from rjax.serve.api.responses import respond
from rjax.serve.api.responses.conversion import chat_body, input_messages
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.responses_api_requests import Reasoning, ResponsesRequest
from rjax.structured.mask_budget import MaskBudget

from .hostile import ask
from .live_server import LiveServer, live_server, make_engine

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "d", "parameters": SCHEMA, "strict": None}
    for name in ("find", "count")
]
ANY_EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


def chat_text(client: openai.OpenAI, messages: list[Any], **more: Any) -> str:
    found = client.chat.completions.create(messages=messages, **GREEDY, **more)
    return found.choices[0].message.content or ""


def checked(found: Response) -> Response:
    """The response, whose every field is of the client's own type."""
    return Response.model_validate_json(found.model_dump_json(by_alias=True))


def test_a_text_is_answered_as_by_the_chat_route(client):
    found = checked(
        client.responses.create(
            input="Who lives in Peru?",
            instructions="Be brief.",
            max_output_tokens=9,
            metadata={"a": "b"},
            user="ann",
            **GREEDY,
        )
    )
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who lives in Peru?"},
    ]
    assert found.output_text == chat_text(client, messages, max_tokens=9)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [item] = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert found.instructions == "Be brief."
    assert (found.metadata, found.user, found.model) == ({"a": "b"}, "ann", "tiny")
    assert (found.temperature, found.max_output_tokens) == (0, 9)
    usage = found.usage
    assert usage.output_tokens == 9
    assert usage.total_tokens == usage.input_tokens + 9


def test_items_become_the_messages_of_a_chat(client, server: LiveServer):
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "Who lives"},
            {"type": "input_text", "text": "there?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Let me see.", "annotations": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": '{"age":7}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "Ann"},
        {"type": "function_call", "call_id": "call_2", "name": "count", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_2", "output": [
            {"type": "input_text", "text": "12"}]},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "find", "arguments": '{"age":7}'}}
    other = {"type": "function", "function": {"name": "count", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who lives\nthere?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "call_1", **call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Ann"},
        {"role": "assistant", "tool_calls": [{"id": "call_2", **other}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "12"},
    ]
    found = client.responses.create(input=items, max_output_tokens=6, **GREEDY)
    assert found.output_text == chat_text(client, messages, max_tokens=6)
    laid_out = ask(server, "POST", "/tokenize", {"messages": messages}).json
    assert found.usage.input_tokens == laid_out["count"]


def test_formats_and_parsed_answers(client):
    class Person(pydantic.BaseModel):
        age: int

    parsed = client.responses.parse(
        input="Ann?", text_format=Person, max_output_tokens=90, **GREEDY
    )
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.status == "completed"
    for wanted in (
        {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True},
        {"type": "json_object"},
        {"type": "text"},
    ):
        found = checked(
            client.responses.create(
                model="tiny",
                input="Ann?",
                text={"format": wanted},
                max_output_tokens=40,
                temperature=1,
                extra_body={"seed": 3, "stop": ["q"] if wanted["type"] == "text" else None},
            )
        )
        assert found.text.format.type == wanted["type"]
        if wanted["type"] == "json_schema":
            assert set(json.loads(found.output_text)) == {"age"}
        if wanted["type"] == "json_object":
            assert found.status == "incomplete" or isinstance(json.loads(found.output_text), dict)


def events_of(client: openai.OpenAI, **more: Any) -> list[Any]:
    """The events of a stream, each of the client's own type, in order."""
    events = list(client.responses.create(stream=True, **more))
    for event in events:
        ANY_EVENT.validate_json(event.model_dump_json(by_alias=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_the_events_of_a_text(client):
    args = {"input": "Who lives in Peru?", "max_output_tokens": 7, **GREEDY}
    events = events_of(client, **args)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    whole = client.responses.create(**args)
    assert text == events[-4].text == events[-3].part.text == whole.output_text
    last = events[-1].response
    assert (last.status, last.output_text) == ("incomplete", text)
    assert last.usage.model_dump(exclude={"input_tokens_details"}) == whole.usage.model_dump(
        exclude={"input_tokens_details"}
    )
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert client.responses.retrieve(last.id) == last


@pytest.mark.sample(1)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "count"}])
def test_a_call_its_events_and_its_result(client, choice):
    args = {
        "model": "tiny",
        "input": "How many?",
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": 80,
        "temperature": 1,
        "extra_body": {"seed": 2},
    }
    found = checked(client.responses.create(**args))
    [call] = found.output
    assert (call.type, call.status, found.status) == ("function_call", "completed", "completed")
    assert call.name in (["find", "count"] if choice == "required" else ["count"])
    assert 0 <= json.loads(call.arguments)["age"] <= 99
    events = events_of(client, **args)
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == call.arguments
    assert (events[-3].arguments, events[-3].name) == (call.arguments, call.name)
    with client.responses.stream(**args) as stream:
        [again] = stream.get_final_response().output
    assert (again.name, again.arguments) == (call.name, call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    # The client's own object goes back as it came, or the server remembers it.
    stateless = client.responses.create(
        input=[{"role": "user", "content": "How many?"}, call, result],
        tools=TOOLS, max_output_tokens=5, **GREEDY,
    )  # fmt: skip
    stateful = client.responses.create(
        input=[result], previous_response_id=found.id, tools=TOOLS, max_output_tokens=5, **GREEDY
    )
    assert stateless.output_text == stateful.output_text
    assert stateless.usage.input_tokens == stateful.usage.input_tokens


def test_logprobs_of_the_text(client):
    args = {
        "input": "Who?",
        "max_output_tokens": 4,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
        **GREEDY,
    }
    [part] = checked(client.responses.create(**args)).output[0].content
    assert len(part.logprobs) == 4
    assert all(len(entry.top_logprobs) == 3 for entry in part.logprobs)
    events = events_of(client, **args)
    streamed = [e for event in events if event.type.endswith("delta") for e in event.logprobs]
    assert [e.logprob for e in streamed] == [e.logprob for e in part.logprobs]
    assert [e.logprob for e in events[-1].response.output[0].content[0].logprobs] == [
        e.logprob for e in part.logprobs
    ]


def test_a_conversation_goes_on_from_a_stored_response(client):
    first = client.responses.create(
        input="Who lives in Peru?", instructions="Be brief.", max_output_tokens=5, **GREEDY
    )
    second = client.responses.create(
        input="And in Chile?", previous_response_id=first.id, max_output_tokens=5, **GREEDY
    )
    third = client.responses.create(
        input="Why?", previous_response_id=second.id, max_output_tokens=5, **GREEDY
    )
    messages: list[Any] = [
        {"role": "user", "content": "Who lives in Peru?"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And in Chile?"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Why?"},
    ]
    assert second.output_text == chat_text(client, messages[:3], max_tokens=5)
    assert third.output_text == chat_text(client, messages, max_tokens=5)
    assert third.previous_response_id == second.id
    # Each stands by itself.
    assert client.responses.retrieve(second.id) == second
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="deleted"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(input="a", previous_response_id=second.id, **GREEDY)
    assert caught.value.param == "previous_response_id"
    assert caught.value.code == "response_not_found"
    assert client.responses.retrieve(third.id) == third
    with pytest.raises(openai.BadRequestError, match="close the connection"):
        client.responses.cancel(third.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel(second.id)


def test_a_response_that_is_not_to_be_stored_is_not(client):
    for stream in (False, True):
        args = {"input": "a", "store": False, "max_output_tokens": 1, **GREEDY}
        found = (
            events_of(client, **args)[-1].response if stream else client.responses.create(**args)
        )
        assert found.model_extra["store"] is False
        with pytest.raises(openai.NotFoundError, match="store false"):
            client.responses.retrieve(found.id)


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "no 'web_search'"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "no 'file_search'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS[:1] * 2}, "tools", "same name"),
        ({"background": True, "store": False}, "background", "`store` is true"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"conversation": "c"}, "conversation", "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "function_call_output"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
         "input.0.message.content.0", "input_image"),
        ({"input": []}, "input", "give 1 to 1024"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens"),
        ({"temperature": 9}, "temperature", "temperature"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "20"),
        ({"include": ["message.output_text.logprobs"], "tools": TOOLS}, "include", "no output"),
        ({"include": ["web_search_call.results"]}, "include.0", "logprobs"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "reasoning_effort"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "name and schema"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format", "no other"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
        ({"user": "a", "safety_identifier": "b"}, "safety_identifier", "one of them"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(client, more, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        client.responses.create(**{"input": "a", **GREEDY, "extra_body": more})
    assert caught.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="a", model="other")


def test_numbers_that_json_cannot_say_are_refused(server: LiveServer):
    tool = {"type": "function", "name": "f", "parameters": {"maximum": float("nan")}}
    body = {"input": "a", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
    for stream in (False, True):
        found = ask(server, "POST", "/v1/responses", {**body, "stream": stream})
        assert found.status == 400, found.body
        assert "NaN" in found.json["error"]["message"]


def test_large_responses_are_written_on_threads(client, monkeypatch):
    args = {"input": "Who?", "max_output_tokens": 3, "instructions": "Brief.", **GREEDY}
    inline = events_of(client, **args)
    monkeypatch.setattr(respond, "_LARGE_ECHO", 0)
    threaded = events_of(client, **args)
    # How many tokens one delta has depends on the reader.
    kinds = [
        [kind for kind, _ in groupby(event.type for event in events)]
        for events in (threaded, inline)
    ]
    assert kinds[0] == kinds[1]
    assert threaded[-1].response.output_text == inline[-1].response.output_text
    whole = client.responses.create(**args)
    assert client.responses.retrieve(whole.id) == whole
    assert whole.output_text == inline[-1].response.output_text


def test_a_stored_response_is_given_whole(client):
    found = client.responses.create(input="a", max_output_tokens=1, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="requested with background and stream"):
        client.responses.retrieve(found.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="'x' is not a parameter of this route"):
        client.responses.retrieve(found.id, extra_query={"x": "1"})


KEYS = ["first-key-1234", "second-key-5678"]


@pytest.fixture(scope="module")
def small(folder) -> Iterator[LiveServer]:
    """A server that keeps little, with two tenants."""
    limits = ServeLimits(responses=3, responses_bytes=8000)
    with live_server(make_engine(folder), keys=KEYS, limits=limits) as found:
        yield found


def create(server: LiveServer, key: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": 1, **more}
    answer = ask(server, "POST", "/v1/responses", body, key=key)
    assert answer.status == 200, answer.body
    return answer.json


def test_the_oldest_responses_go_and_tenants_have_their_own(small: LiveServer):
    def status(name: str, key: str, method: str = "GET") -> int:
        return ask(small, method, f"/v1/responses/{name}", key=key).status

    others = create(small, KEYS[1], "mine")["id"]
    names = [create(small, KEYS[0], f"number {i}")["id"] for i in range(5)]
    assert [status(name, KEYS[0]) for name in names] == [404, 404, 200, 200, 200]
    assert status(others, KEYS[1]) == 200
    # The other's is as one that nobody has.
    for method, path, body in (
        ("GET", "/v1/responses/{}", None),
        ("GET", "/v1/responses/{}/input_items", None),
        ("DELETE", "/v1/responses/{}", None),
        ("POST", "/v1/responses/{}/cancel", None),
        ("POST", "/v1/responses", {"input": "a", "previous_response_id": "{}"}),
    ):
        shown = set()
        for name in (others, "resp_nobodys"):
            full = body and {**body, "previous_response_id": name}
            found = ask(small, method, path.format(name), full, key=KEYS[0])
            shown.add((found.status, found.body.decode().replace(name, "NAME")))
        assert len(shown) == 1
        assert next(iter(shown))[0] == 404
    assert status(others, KEYS[1]) == 200
    # Bytes are bounded too, and a response that is larger than all of them says so.
    long = "x" * 300
    names = [create(small, KEYS[0], long, metadata={"a": long})["id"] for _ in range(3)]
    assert status(names[2], KEYS[0]) == 200
    huge = create(small, KEYS[0], "a", metadata={str(i): "y" * 512 for i in range(16)})
    assert huge["store"] is False
    assert status(huge["id"], KEYS[0]) == 404
    assert status(names[2], KEYS[0]) == 200


def test_a_stream_whose_grammar_fails_ends_as_failed(client, monkeypatch):
    monkeypatch.setattr(MaskBudget, "spend", lambda self, seconds: False)
    wanted = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    args = {"input": "Ann?", "text": {"format": wanted}, "max_output_tokens": 50, **GREEDY}
    last = events_of(client, **args)[-1]
    assert last.type == "response.failed"
    assert last.response.error.code == "invalid_prompt"
    assert "too long at each token" in last.response.error.message
    with pytest.raises(openai.BadRequestError, match="too long at each token"):
        client.responses.create(**args)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_the_effort_goes_to_templates_that_know_it():
    body = ResponsesRequest(
        input="a", reasoning=Reasoning(effort="low"), chat_template_kwargs={"x": 1}
    )
    made = chat_body(body, input_messages(body.input), knows_effort=True)
    assert made.chat_template_kwargs == {"x": 1, "reasoning_effort": "low"}
