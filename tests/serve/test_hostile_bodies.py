"""No body stops the event loop: not for 0.2 s within the limits, not for 1 s when refused.

| body | answer | bound on the loop's pause |
| --- | --- | --- |
| lists and messages of wrong entries, unknown fields, millions of values | 400 | 1.0 s |
| the most token ids, values, parts and alternatives that are allowed | 200 or 400 | 0.2 s |

In all cases at most 200 MB more memory are in use afterwards.
"""

import asyncio
import json

import httpx2
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from rjax.serve.api.bodies import parse_body
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.request_limits import RequestLimitsMiddleware
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.fields import UnknownFields
from rjax.serve.protocol.requests import CompletionRequest
from rjax.serve.protocol.value_count import at_most_values
from rjax.serve.telemetry.metrics import Metrics

from .live_server import LiveServer
from .watch import best_of_two, check_memory, resident, watched

COMPLETIONS, CHAT, PREFIXES = "/v1/completions", "/v1/chat/completions", "/v1/prefixes"
RESPONSES = "/v1/responses"
MOST = ServeLimits().body_values
JSON = {"Content-Type": "application/json"}


def listed(entry: str, count: int) -> str:
    return "[" + ",".join([entry] * count) + "]"


def chat(**message: object) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "a", **message}]})


def large(template: str, entries: str) -> bytes:
    return (template % entries).encode()


REFUSED = {
    "prompt of mixed entries": (COMPLETIONS, large('{"prompt":%s}', listed("0,{}", 500_000))),
    "prompt of objects": (COMPLETIONS, large('{"prompt":%s}', listed("{}", MOST - 9))),
    "15 MB of token ids": (COMPLETIONS, large('{"prompt":%s}', listed("0", 7_500_000))),
    "prompt of slow numbers": (
        COMPLETIONS,
        large('{"prompt":%s}', listed("1.2345678901234567e-300", MOST - 9)),
    ),
    "numbers of 4,300 digits": (COMPLETIONS, large('{"prompt":%s}', listed("9" * 4300, 3000))),
    "2 MB of empty messages": (CHAT, large('{"messages":%s}', listed("{}", 700_000))),
    "messages of any kind": (CHAT, large('{"messages":%s}', listed("{}", 1000))),
    "unknown fields": (CHAT, json.dumps({f"x{i}": 0 for i in range(MOST // 2)}).encode()),
    "unknown fields of a message": (CHAT, chat(**{f"x{i}": 0 for i in range(MOST // 2)}).encode()),
    "parts": (CHAT, chat(content=[{"type": "text", "text": ""}] * 60_000).encode()),
    "wrong parts": (CHAT, chat(content=[{"type": "text", "text": ""}] * 4000 + [0]).encode()),
    "biases that are no numbers": (
        COMPLETIONS,
        json.dumps({"prompt": "a", "logit_bias": {str(i): "x" for i in range(MOST // 2)}}).encode(),
    ),
    "deep": (COMPLETIONS, b'{"prompt":' + b"[" * 8_000_000),
    "no JSON at its end": (COMPLETIONS, large('{"prompt":%s', listed('"a"', MOST - 9))),
    "arguments of a call": (
        CHAT,
        json.dumps({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {
            "name": "f", "arguments": listed("[]", 2_000_000)}}]}]}).encode(),
    ),
    "items of any kind": (RESPONSES, large('{"input":%s}', listed("{}", 1000))),
    "2 MB of empty items": (RESPONSES, large('{"input":%s}', listed("{}", 200_000))),
    "parts of an item": (
        RESPONSES,
        large(
            '{"input":[{"role":"user","content":%s}]}',
            listed('{"type":"input_text","text":""}', 60_000),
        ),
    ),
    "parts of an output": (
        RESPONSES,
        large(
            '{"input":[{"type":"function_call_output","call_id":"a","output":%s}]}',
            listed('{"type":"input_text","text":""}', 60_000),
        ),
    ),
    "an echo of many values": (
        RESPONSES,
        large(
            '{"input":"a","max_output_tokens":1,"tool_choice":"none","tools":[{"type":"function",'
            '"name":"f","parameters":{"enum":%s}}]}',
            listed("12", MOST - 30),
        ),
    ),
    "a streamed echo of a long text": (
        RESPONSES,
        large(
            '{"input":"a","max_output_tokens":1,"stream":true,"tool_choice":"none","tools":[{'
            '"type":"function","name":"f","description":"%s"}]}',
            "\\u4e2d" * 2_500_000,
        ),
    ),
    "tools of any kind": (RESPONSES, large('{"input":"a","tools":%s}', listed("{}", 200_000))),
    "prefix": (PREFIXES, large('{"name":"a","prompt":%s}', listed("0,{}", 100_000))),
    "detokenize": ("/detokenize", large('{"tokens":%s}', listed("0,{}", 100_000))),
    "long text": (COMPLETIONS, large('{"prompt":"%s"}', "\\u4e2d" * 2_700_000)),
}  # fmt: skip
ALLOWED = {
    "token ids": (
        COMPLETIONS,
        large('{"max_tokens":1,"truncate_prompt_tokens":4,"prompt":%s}', listed("12", MOST - 9)),
        200,
    ),
    "detokenize too many": ("/detokenize", large('{"tokens":%s}', listed("12", MOST - 9)), 400),
    "allowed tokens": (
        COMPLETIONS,
        large('{"max_tokens":1,"prompt":"a","allowed_token_ids":%s}', listed("12", 131_072)),
        200,
    ),
    "parts of items": (
        RESPONSES,
        large(
            '{"max_output_tokens":1,"input":[{"role":"user","content":%s}]}',
            listed('{"type":"input_text","text":""}', 4096),
        ),
        400,  # parsed and rendered; their line breaks make a long prompt
    ),
    "parts": ("/tokenize", chat(content=[{"type": "text", "text": ""}] * 4096).encode(), 200),
    "unknown fields": (
        "/tokenize",
        chat(
            content=[{"type": "text", "text": ""} | {f"x{i}": 0 for i in range(64)}] * 3900
        ).encode(),
        200,
    ),
    "prompts": (
        COMPLETIONS,
        large(
            '{"max_tokens":1,"truncate_prompt_tokens":1,"prompt":%s}',
            listed(listed("12", 60_000), 4),
        ),
        200,
    ),
    "spaces": (COMPLETIONS, b'{"max_tokens":1,"prompt":"a"' + b" " * 15_000_000 + b"}", 200),
}


def pause(server: LiveServer, path: str, content: bytes, status: int) -> float:
    before = resident()
    with watched(server) as found:
        answer = httpx2.post(server.url + path, content=content, headers=JSON, timeout=120)
    assert answer.status_code == status, answer.text[:300]
    check_memory(before)
    return found.pause


@pytest.mark.parametrize("name", REFUSED)
def test_refused_bodies_do_not_stop_the_loop(server: LiveServer, name: str):
    path, content = REFUSED[name]
    best_of_two(lambda: pause(server, path, content, 400), 1.0)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_bodies_do_not_stop_the_loop(server: LiveServer, name: str):
    path, content, status = ALLOWED[name]
    best_of_two(lambda: pause(server, path, content, status), 0.2)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0", 1),
        ("[]", 1),
        ("[0]", 2),
        ('{"a":[1,2,{"b":3}]}', 6),
        ('{"a,[{":"x,[{"}', 2),
        (r'["\",[{","a\\",[1]]', 5),
        (r'["\\\\\",[",2]', 3),
        (r'["é,\u005b,",{}]', 3),
    ],
)
def test_values_are_counted_outside_strings(text: str, values: int):
    """An empty list or object counts as if it held one more."""
    assert at_most_values(text.encode(), values + 1)
    assert not at_most_values(text.encode(), values - 1)


def test_a_text_full_of_commas_is_one_value():
    body = json.dumps({"prompt": 'a,"[{\\' * 100_000}).encode()
    assert parse_body(body, CompletionRequest, ServeLimits(body_values=3), UnknownFields())
    with pytest.raises(ApiError, match="JSON values"):
        parse_body(body, CompletionRequest, ServeLimits(body_values=1), UnknownFields())


def test_bodies_have_a_bound_together():
    """Until its request ends, a body counts."""
    limits = ServeLimits(bodies_bytes=2000)
    ends = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert len((await receive())["body"]) == 1500
        await ends.wait()
        await JSONResponse({})(scope, receive, send)

    intake = RequestLimitsMiddleware(app, limits, KeyRing([]), Metrics("tiny", {}).rejected)

    async def status() -> int:
        found: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b" " * 1500, "more_body": False}

        async def send(message: Message) -> None:
            found.append(message)

        await intake({"type": "http", "path": "/version", "headers": []}, receive, send)
        return found[0]["status"]

    async def run() -> None:
        first = asyncio.ensure_future(status())
        gone = asyncio.ensure_future(status())
        await asyncio.sleep(0)
        gone.cancel()
        assert await status() == 503
        ends.set()
        assert await first == 200
        assert await status() == 200

    asyncio.run(run())


def test_a_slash_more_is_no_redirect(server: LiveServer):
    """A Location made of the Host header would send a client, and its key, anywhere."""
    for path in (COMPLETIONS, "/v1/models", PREFIXES, "/health", RESPONSES, "/ping", "/docs"):
        for method in ("GET", "POST"):
            found = httpx2.request(
                method, server.url + path + "/", headers={"Host": "evil.example"}, timeout=20
            )
            assert found.status_code in (404, 405), (path, found.status_code)
            assert "location" not in found.headers


@pytest.mark.parametrize("name", [".", ".."])
def test_names_that_no_path_can_hold_are_refused(server: LiveServer, name: str):
    body = {"name": name, "prompt": "a"}
    answer = httpx2.post(server.url + PREFIXES, json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "name"
