"""GET /v1/responses/{id}/input_items, driven by the official client."""

import json
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import ResponseItem
from starlette.datastructures import QueryParams

from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses_api_requests import ResponsesRequest
from rjax.serve.stores.input_items import page, stored_items

from .hostile import ask
from .live_server import LiveServer

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 1}
ANY_ITEM = pydantic.TypeAdapter[ResponseItem](ResponseItem)
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "Who lives "}, {"type": "input_text", "text": "thére?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
        {"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "text": "Let me see.", "annotations": []},
        {"type": "refusal", "refusal": "No."}]},
    {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": '{"age":7}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "Ann"},
    {"role": "assistant", "content": "Ann."},
    {"type": "function_call", "call_id": "call_2", "name": "count", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_2", "output": [
        {"type": "input_text", "text": "12"}]},
]  # fmt: skip


def of_response(client: openai.OpenAI, name: str, **more: Any) -> list[dict[str, Any]]:
    """All items, each of the client's own type, over as many pages as it takes."""
    found = [item.model_dump(exclude_none=True) for item in
             client.responses.input_items.list(name, **more)]  # fmt: skip
    for item in found:
        ANY_ITEM.validate_python(item)
    assert len({item["id"] for item in found}) == len(found)
    return found


def test_a_text_is_a_message_of_the_user(client):
    for given in ("Who lives in Peru?", [{"role": "user", "content": "Who lives in Peru?"}]):
        made = client.responses.create(input=given, instructions="Be brief.", **GREEDY)
        [item] = of_response(client, made.id)
        assert item.pop("id").startswith("msg_")
        assert item == {
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": "Who lives in Peru?"}],
        }


def test_every_kind_of_item_comes_back(client):
    made = client.responses.create(input=ITEMS, **GREEDY)
    found = of_response(client, made.id, order="asc")
    assert found == of_response(client, made.id)[::-1]
    assert {item.pop("status") for item in found} == {"completed"}
    ids = [item.pop("id").partition("_")[0] for item in found]
    assert ids == ["msg", "msg", "rs", "msg", "fc", "fco", "msg", "fc", "fco"]
    said = {"type": "output_text", "annotations": []}
    assert found == [
        {"type": "message", "role": "developer", "content": [
            {"type": "input_text", "text": "Be brief."}]},
        ITEMS[1],
        {name: value for name, value in ITEMS[2].items() if name != "id"},
        {"type": "message", "role": "assistant", "content": [
            {**said, "text": "Let me see."}, {"type": "refusal", "refusal": "No."}]},
        *ITEMS[4:6],
        {"type": "message", "role": "assistant", "content": [{**said, "text": "Ann."}]},
        *ITEMS[7:],
    ]  # fmt: skip
    # The listed items are an input themselves.
    again = client.responses.create(input=found, **GREEDY)
    assert again.usage.input_tokens == made.usage.input_tokens


def test_items_are_those_of_the_request_itself(client):
    first = client.responses.create(input="a", **GREEDY)
    events = client.responses.create(
        input="b", previous_response_id=first.id, stream=True, **GREEDY
    )
    *_, last = events
    [item] = of_response(client, last.response.id)
    assert item["content"][0]["text"] == "b"


def test_pages(client):
    given: list[Any] = [{"role": "user", "content": str(i)} for i in range(25)]
    name = client.responses.create(input=given, **GREEDY).id
    for order, texts in (
        ("asc", [str(i) for i in range(25)]),
        ("desc", [str(i) for i in range(24, -1, -1)]),
    ):
        for limit in (1, 5, 24, 25, 100):
            found = of_response(client, name, order=order, limit=limit)
            assert [item["content"][0]["text"] for item in found] == texts
    whole = client.responses.input_items.list(name)
    assert len(whole.data) == 20 and whole.has_more
    rest = client.responses.input_items.list(name, after=whole.data[-1].id)
    assert len(rest.data) == 5 and not rest.has_more
    assert rest.to_dict()["first_id"] == rest.data[0].id
    none = client.responses.input_items.list(name, after=rest.data[-1].id)
    assert none.to_dict() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    include: Any = ["reasoning.encrypted_content"]
    assert client.responses.input_items.list(name, include=include).data == whole.data


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("limit=-1", 400, "limit"),
        ("limit=1e1", 400, "limit"),
        ("limit=9999999999999999999", 400, "limit"),
        ("order=newest", 400, "order"),
        ("before=msg_1", 400, "before"),
        ("after=msg_1", 404, "after"),
    ],
)
def test_queries_that_are_refused(client, server: LiveServer, query, status, param):
    name = client.responses.create(input="a", **GREEDY).id
    found = ask(server, "GET", f"/v1/responses/{name}/input_items?{query}")
    assert (found.status, found.json["error"]["param"]) == (status, param)


def test_responses_that_are_not_stored_have_none(client):
    for name in ("resp_1", client.responses.create(input="a", store=False, **GREEDY).id):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.input_items.list(name)
        assert caught.value.code == "response_not_found"


def test_any_text_is_json():
    text = '\ud800 "\\ \n é 🙂'
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    body = ResponsesRequest.model_validate({"input": [item]})
    assert not isinstance(body.input, str)
    body.input[0].summary[0].text = text  # type: ignore[union-attr, index]
    items = stored_items(body.input, "resp_1")
    made = json.loads(page(items, QueryParams("")))
    assert made["data"][0]["summary"][0]["text"] == text
    with pytest.raises(ApiError):
        page(items, QueryParams("after=x"))
