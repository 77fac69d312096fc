"""Fields of request bodies: what is read, what is ignored, what is refused, and the table of it."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from rjax import serve
from rjax.commands.serve.options import build_parser
from rjax.serve.api.bodies import parse_body
from rjax.serve.api.openapi import REQUEST_MODELS
from rjax.serve.api.sampling import (
    Alternatives,
    chat_params,
    completion_params,
    request_constraint,
)
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    RequestModel,
    TokenizeRequest,
)
from rjax.serve.protocol.responses_api_requests import ResponsesRequest

HI = [{"role": "user", "content": "a"}]
CHAT: dict[str, Any] = {"messages": HI}
COMPLETION: dict[str, Any] = {"prompt": "a"}
RESPONSE: dict[str, Any] = {"input": "a"}
BASES: dict[type[RequestModel], dict[str, Any]] = {
    ChatCompletionRequest: CHAT,
    CompletionRequest: COMPLETION,
    ResponsesRequest: RESPONSE,
}
TABLE = Path(serve.__file__).with_name("README.md")
LIMITS = ServeLimits()
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": None, "description": None}}


def parsed[B: RequestModel](kind: type[B], body: dict[str, Any], *, strict: bool = False) -> B:
    return parse_body(json.dumps(body).encode(), kind, LIMITS, UnknownFields(strict=strict))


def refusal(kind: type[RequestModel], body: dict[str, Any], *, strict: bool = False) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parsed(kind, body, strict=strict)
    assert caught.value.status == 400
    return caught.value


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == "rjax.serve"]
    caplog.clear()
    return found


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "colour"),
    ({"messages": [{**HI[0], "mood": 1}]}, "messages.mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "lang": 1}]}]},
        "messages.content.lang",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, *HI]},
        "messages.tool_calls.index",
    ),
    ({"tools": [{**TOOL, "kind": 1}]}, "tools.kind"),
    ({"response_format": {"type": "text", "mode": 1}}, "response_format.mode"),
    ({"stream_options": {"every": 1}}, "stream_options.every"),
]


UNKNOWN_OF_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"colour": 1}, "colour"),
    *(
        ({"input": [{**item, "mood": 1}]}, f"input.{item['type']}.mood")
        for item in (
            {"type": "message", "role": "user", "content": "a"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "a"},
            {"type": "reasoning", "summary": []},
        )
    ),
    *(
        (
            {"input": [{"type": kind, **more, name: [{**part, "lang": 1}]}]},
            f"input.{kind}.{name}.lang",
        )
        for kind, name, part, more in (
            ("message", "content", {"type": "input_text", "text": "a"}, {"role": "user"}),
            ("message", "content", {"type": "output_text", "text": "a"}, {"role": "assistant"}),
            (
                "function_call_output",
                "output",
                {"type": "input_text", "text": "a"},
                {"call_id": "1"},
            ),
            ("reasoning", "summary", {"type": "summary_text", "text": "a"}, {}),
            ("reasoning", "content", {"type": "reasoning_text", "text": "a"}, {}),
        )
    ),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools.defer_loading"),
    ({"tool_choice": {"type": "function", "name": "f", "mode": 1}}, "tool_choice.mode"),
    ({"text": {"tone": 1}}, "text.tone"),
    ({"text": {"format": {"type": "text", "mode": 1}}}, "text.format.mode"),
    ({"reasoning": {"depth": 1}}, "reasoning.depth"),
    ({"stream_options": {"every": 1}}, "stream_options.every"),
]


@pytest.mark.parametrize(
    ("kind", "body", "name"),
    [(ChatCompletionRequest, *case) for case in UNKNOWN]
    + [(ResponsesRequest, *case) for case in UNKNOWN_OF_RESPONSES],
)
def test_unknown_fields_are_ignored_and_logged_once(caplog, kind, body, name):
    unknown = UnknownFields()
    data = json.dumps(BASES[kind] | body).encode()
    for _ in range(3):
        parse_body(data, kind, LIMITS, unknown)
    [line] = warnings_of(caplog)
    assert f"'{name}'" in line
    error = refusal(kind, BASES[kind] | body, strict=True)
    assert error.code == "unknown_parameter"
    assert error.param is not None
    assert re.sub(r"\.\d+", "", error.param) == name
    assert warnings_of(caplog) == []


def test_names_of_unknown_fields_can_flood_neither_log_nor_memory(caplog):
    unknown = UnknownFields()

    def send(names: list[str]) -> None:
        parse_body(
            json.dumps(COMPLETION | dict.fromkeys(names, 1)).encode(),
            CompletionRequest,
            LIMITS,
            unknown,
        )

    send(["a\nERROR forged\x1b[2J\u202e", "x" * 100_000])
    first, second = warnings_of(caplog)
    assert first.isprintable() and first.isascii()
    assert "a\\nERROR forged" in first
    assert len(second) < 200
    for i in range(30):
        send([f"x{i}-{j}" for j in range(50)])
    lines = warnings_of(caplog)
    assert len(lines) == 255
    assert "256 unknown fields" in lines[-1]
    assert len(unknown._logged) == 256
    send(["another"])
    assert warnings_of(caplog) == []


def test_many_unknown_fields_of_one_object_are_refused(caplog):
    many = dict.fromkeys(map(str, range(200)), 1)
    assert "200" in str(refusal(TokenizeRequest, many))
    error = refusal(ChatCompletionRequest, {"messages": [{**HI[0], **many}] * 90})
    assert error.param == "messages.0"
    few = dict.fromkeys(map(str, range(60)), 1)
    parsed(ChatCompletionRequest, {"messages": [{**HI[0], **few}] * 90})
    assert len(warnings_of(caplog)) == 60


REFUSED: list[tuple[type[RequestModel], str, Any, str]] = [
    (CompletionRequest, "suffix", "b", "suffix"),
    (CompletionRequest, "guided_json", {}, "structured_outputs"),
    (ChatCompletionRequest, "functions", [{"name": "f"}], "tools"),
    (ChatCompletionRequest, "function_call", {"name": "f"}, "tool_choice"),
    (ChatCompletionRequest, "audio", {"voice": "a"}, "text"),
    (ResponsesRequest, "use_beam_search", True, "/v1/chat/completions"),
    (ChatCompletionRequest, "lora_path", "a", "adapters"),
    (ChatCompletionRequest, "chat_template", "{{ 1 }}", "--chat-template"),
    (ChatCompletionRequest, "prefix", "support", "prefixes"),
    (ChatCompletionRequest, "web_search_options", {}, "tools"),
    (ResponsesRequest, "conversation", "c", "previous_response_id"),
    (ResponsesRequest, "prompt", {"id": "p"}, "instructions"),
    (ResponsesRequest, "truncation", "auto", "disabled"),
    (ResponsesRequest, "max_tokens", 5, "max_output_tokens"),
    (ResponsesRequest, "response_format", {"type": "json_object"}, "text.format"),
    (ResponsesRequest, "n", 2, "several requests"),
    (ResponsesRequest, "guided_json", {}, "structured_outputs"),
]


@pytest.mark.parametrize(("kind", "name", "value", "advice"), REFUSED)
def test_fields_that_change_the_answer_are_refused_by_name(caplog, kind, name, value, advice):
    base = BASES[kind]
    error = refusal(kind, base | {name: value})
    assert error.code == "unsupported_parameter"
    assert error.param == name
    assert advice in str(error)
    parsed(kind, base | {name: None})
    for neutral in kind.refused[name].neutral:
        parsed(kind, base | {name: neutral}, strict=True)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages.0.function_call"),
        ({"messages": [{"role": "assistant", "audio": {"id": "1"}}]}, "messages.0.audio"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        (
            {"structured_outputs": {"regex": "a", "structural_tag": "b"}},
            "structured_outputs.structural_tag",
        ),
        ({"modalities": ["text", "audio"]}, "modalities.1"),
    ],
)
def test_so_are_those_of_nested_objects(body, param):
    assert refusal(ChatCompletionRequest, CHAT | body).param == param


def bodies() -> list[type[RequestModel]]:
    """Every body and every object in one."""
    left: list[Any] = list(REQUEST_MODELS)
    found: list[type[RequestModel]] = []
    while left:
        item = left.pop(0)
        if isinstance(item, type) and issubclass(item, RequestModel) and item not in found:
            found.append(item)
            left += [field.annotation for field in item.__pydantic_fields__.values()]
        left += [*get_args(item), *get_args(getattr(item, "__value__", None))]
    return found


REQUIRED: dict[str, Any] = {
    "messages": HI,
    "prompt": "a",
    "tokens": [1],
    "name": "a",
    "pin": True,
    "id": "1",
    "arguments": "{}",
    "text": "a",
    "role": "user",
    "function": {"name": "f", "arguments": "{}"},
    "input": "a",
    "content": "a",
    "call_id": "1",
    "output": "a",
    "refusal": "a",
    "init_info": {"master_port": 1},
    "master_port": 1,
    "update_info": {"names": [], "dtype_names": [], "shapes": []},
    "names": [],
    "dtype_names": [],
    "shapes": [],
    "token_ids": [1],
    "prompts": ["a"],
    "port": 1,
    "dtype": "float32",
    "shape": [1],
}


@pytest.mark.parametrize("kind", bodies(), ids=lambda kind: kind.__name__)
def test_null_is_an_absent_field(kind: type[RequestModel]):
    types = kind.__pydantic_fields__.get("type")
    required = REQUIRED | {"type": get_args(types.annotation)[0] if types else None}
    given = {
        field.alias or name: required[field.alias or name]
        for name, field in kind.__pydantic_fields__.items()
        if field.is_required()
    }
    nulls = dict.fromkeys([*kind.names, *kind.refused, "unknown"])
    found = kind.model_validate(nulls | given)
    assert found == kind.model_validate(given)
    assert found.model_fields_set == kind.model_validate(given).model_fields_set
    for name in given:
        with pytest.raises(ValueError, match="required"):
            kind.model_validate(given | {name: None})
    schema = kind.model_json_schema()["properties"]
    assert all(accepts_null(schema[name]) == (name not in given) for name in kind.names)


def accepts_null(schema: dict[str, Any]) -> bool:
    return {"type": "null"} in schema.get(
        "anyOf", [{"type": "null"}] * ("type" not in schema)
    ) and ("$ref" not in schema and "const" not in schema)


def test_what_is_accepted_in_silence(caplog):
    more = {
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "user": "ann",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "modalities": ["text"],
        "verbosity": "low",
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "a"},
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
    }
    body = parsed(ChatCompletionRequest, CHAT | more, strict=True)
    assert chat_params(body, {}, LIMITS) == chat_params(
        parsed(ChatCompletionRequest, {**CHAT, "stream": True}), {}, LIMITS
    )
    assert warnings_of(caplog) == []


def test_answers_can_be_sent_back(caplog):
    message = {
        "role": "assistant",
        "content": "b",
        "provider_specific_fields": {"refusal": None},
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "reasoning_content": "hm",
        "reasoning": "hm",
        "tool_calls": [],
        "name": "ann",
    }
    for again in (message, message | {"tool_calls": None, "annotations": None, "name": None}):
        body = parsed(ChatCompletionRequest, {"messages": [*HI, again, *HI]}, strict=True)
        shown = body.messages[1].model_dump(exclude_none=True)
        assert "annotations" not in shown and "provider_specific_fields" not in shown
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("value", [1, 1.0])
def test_whole_numbers_may_be_written_with_a_point(value):
    names = ["n", "max_completion_tokens", "seed", "top_k", "min_tokens", "top_logprobs"]
    body = parsed(ChatCompletionRequest, CHAT | dict.fromkeys(names, value) | {"logprobs": True})
    params = chat_params(body, {}, LIMITS)
    found = (params.n, params.max_tokens, params.seed, params.top_k, params.min_tokens)
    assert found == (1,) * 5
    assert all(type(number) is int for number in found)
    for bad in (1.5, 1e400, "one", "1.5", "9" * 5000, [1], {"a": 1}):
        assert refusal(ChatCompletionRequest, CHAT | {"n": bad}).param == "n"


def test_logprobs_of_a_chat_may_be_0_or_1():
    def wanted(**more: Any) -> int | None:
        return chat_params(parsed(ChatCompletionRequest, CHAT | more), {}, LIMITS).logprobs

    assert wanted(logprobs=0, top_logprobs=0) is None
    assert wanted(logprobs=1) == 0
    assert wanted(logprobs=1, top_logprobs=3) == 3
    assert "top_logprobs" in str(refusal(ChatCompletionRequest, CHAT | {"logprobs": 5}))
    with pytest.raises(ApiError, match="needs logprobs"):
        wanted(top_logprobs=1)


def test_logprobs_of_the_whole_vocabulary_stay_within_the_limit():
    body = parsed(CompletionRequest, COMPLETION | {"prompt_logprobs": -1, "logprobs": -1})
    with pytest.raises(ApiError, match="with --max-logprobs 300") as caught:
        completion_params(body, {}, LIMITS, Alternatives(20, 300))
    assert caught.value.param == "prompt_logprobs"
    params = completion_params(body, {}, LIMITS, Alternatives(300, 300))
    assert (params.logprobs, params.prompt_logprobs) == (300, 300)
    chat = parsed(ChatCompletionRequest, CHAT | {"logprobs": True, "top_logprobs": -1})
    assert chat_params(chat, {}, LIMITS, Alternatives(300, 300)).logprobs == 300
    with pytest.raises(ApiError, match="0 to 20"):
        completion_params(body, {}, LIMITS)


def test_prompt_logprobs_are_not_lost_in_a_chats_stream():
    body = parsed(ChatCompletionRequest, CHAT | {"stream": True, "prompt_logprobs": 1})
    with pytest.raises(ApiError, match="prompt_logprobs"):
        chat_params(body, {}, LIMITS)


def test_completions_take_a_response_format():
    body = parsed(CompletionRequest, COMPLETION | {"response_format": {"type": "json_object"}})
    found = request_constraint(body, LIMITS, literal=False)
    assert found is not None and found.kind == "json"


def test_two_equal_constraints_are_one():
    body = {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}}
    parsed_body = parsed(CompletionRequest, COMPLETION | body)
    found = request_constraint(parsed_body, LIMITS, literal=False)
    assert found is not None and found.kind == "json"
    body["structured_outputs"] = {"regex": "a"}
    with pytest.raises(ApiError, match="differ"):
        request_constraint(parsed(CompletionRequest, COMPLETION | body), LIMITS, literal=False)


def test_the_option():
    assert build_parser().parse_args(["--strict-fields"]).strict_fields
    assert not build_parser().parse_args([]).strict_fields


def test_the_table_of_fields():
    """README.md has each field of each model, and no other, with what becomes of it."""
    rows: dict[str, set[tuple[str, str]]] = {}
    text = TABLE.read_text("utf-8").split("\n## Fields\n")[1].split("\n## ")[0]
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or set(line) <= set("|- ") or cells[0] == "of":
            continue
        places, names, state, why = cells
        assert why, line
        for place in places.split(", "):
            for name in names.split(", "):
                found = rows.setdefault(place, set())
                assert name not in {known for known, _ in found}, (place, name)
                found.add((name, state))
    expected: dict[str, set[tuple[str, str]]] = {}
    for kind in bodies():
        route = re.search(r"/[^\s:]*", kind.__doc__ or "")
        place = kind.place or (route.group() if route else "")
        found = expected.setdefault(place.rstrip("."), set())
        for name, field in kind.__pydantic_fields__.items():
            found.add((field.alias or name, "ignored" if field.exclude else "works"))
        found |= {(name, "refused") for name in kind.refused}
    assert rows == expected


def test_every_ignored_field_stays_in_the_body():
    """What clients send without effect reaches neither prompts nor workers."""
    for kind in bodies():
        for name, field in kind.__pydantic_fields__.items():
            assert bool(field.exclude) == (field.annotation is Any), (kind, name)
    assert issubclass(Message, BaseModel)
