"""Texts and numbers that request fields convert, as pydantic's lax mode does in vLLM."""

from typing import Any

import httpx2
import pytest

from rjax.serve.api.sampling import chat_params
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from rjax.serve.protocol.responses_api_requests import ResponsesRequest

from .test_fields import BASES, CHAT, LIMITS, RESPONSE, parsed, refusal

TYPED: list[tuple[str, Any, Any]] = [
    ("n", "2", 2),
    ("max_tokens", " 5 ", 5),
    ("seed", True, 1),
    ("temperature", "0.5", 0.5),
    ("top_p", True, 1.0),
    ("stream", "true", True),
    ("stream", 1, True),
    ("logprobs", "true", True),
    ("logprobs", "no", False),
    ("ignore_eos", "off", False),
    ("parallel_tool_calls", 0.0, False),
    ("stop_token_ids", ["5", 6.0], [5, 6]),
    ("logit_bias", {"5": "1.5"}, {"5": 1.5}),
    ("return_token_ids", "1", True),
    ("chat_template_kwargs", {"a": "true", "b": 1, "c": True}, {"a": "true", "b": 1, "c": True}),
]


@pytest.mark.parametrize(("name", "given", "wanted"), TYPED)
def test_texts_for_numbers_and_booleans_are_converted_as_by_pydantic(name, given, wanted):
    found = getattr(parsed(ChatCompletionRequest, CHAT | {name: given}), name)
    assert found == wanted
    assert type(found) is type(wanted)


@pytest.mark.parametrize("kind", BASES)
def test_a_seed_has_64_bits(kind):
    for seed, bound in ((-(2**63) - 1, "greater_than_equal"), (2**63, "less_than_equal")):
        error = refusal(kind, BASES[kind] | {"seed": seed})
        assert error.param == "seed"
        assert bound in error.message
    for seed in (-(2**63), 2**63 - 1):
        found: Any = parsed(kind, BASES[kind] | {"seed": seed})
        assert found.seed == seed


def test_so_are_those_of_other_routes():
    body = parsed(CompletionRequest, {"prompt": ["5"], "logprobs": "3", "echo": "yes"})
    assert (body.prompt, body.logprobs, body.echo) == (["5"], 3, True)
    response = parsed(ResponsesRequest, RESPONSE | {"store": "false", "max_output_tokens": "7"})
    assert (response.store, response.max_output_tokens) == (False, 7)
    asked = {"include_usage": "true"}
    chat = parsed(ChatCompletionRequest, CHAT | {"stream": True, "stream_options": asked})
    assert chat.stream_options is not None and chat.stream_options.include_usage is True
    tokens = parsed(TokenizeRequest, {"prompt": "5", "add_special_tokens": "false"})
    assert (tokens.prompt, tokens.add_special_tokens) == ("5", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "warm"),
        ("temperature", [1]),
        ("stream", "maybe"),
        ("stream", 2),
        ("logprobs", "many"),
        ("stop", 5),
        ("user", 5),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {"5": "much"}),
        ("messages", "hi"),
    ],
)
def test_what_pydantic_does_not_convert_is_refused(name, value):
    error = refusal(ChatCompletionRequest, CHAT | {name: value})
    assert error.param is not None and error.param.startswith(name)


@pytest.mark.parametrize("value", ["nan", "inf", "-Infinity"])
def test_texts_that_are_no_finite_number_are_refused(value):
    with pytest.raises(ApiError, match="temperature"):
        chat_params(parsed(ChatCompletionRequest, CHAT | {"temperature": value}), {}, LIMITS)
    with pytest.raises(ApiError, match="logit_bias"):
        chat_params(parsed(ChatCompletionRequest, CHAT | {"logit_bias": {"5": value}}), {}, LIMITS)


def test_the_description_of_the_routes_names_the_converted_types(server):
    schemas = httpx2.get(server.url + "/openapi.json", timeout=60).json()["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    for name, kind in (("n", "integer"), ("stream", "boolean")):
        [types] = [form["type"] for form in fields[name]["anyOf"] if form["type"] != "null"]
        assert types[0] == kind
        assert "string" in types
    assert schemas["UsageInfo"]["properties"]["prompt_tokens"]["type"] == "integer"
