"""Every bound, with zero, negative, huge and NaN: a 400 in the API's shape, and nothing dies."""

import asyncio
import dataclasses
import json
import time
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from rjax import serve
from rjax.benchmarks.stream_client import Address, Arrival, stream_load
from rjax.commands.serve.command import main
from rjax.errors import InvalidConfigError
from rjax.serve.config.limits import ServeLimits, limits_table
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.loading.service_builder import make_service

from .hostile import connect, raw_post
from .live_server import LiveServer, live_server, make_engine, zygote

HUGE = (2**31, 2**63, 10**400)
COMPLETION = {"prompt": "a", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def tools(count: int, name: str = "f{}") -> list:
    return [{"type": "function", "function": {"name": name.format(i)}} for i in range(count)]


NUMBERS = {
    "n": (0, -1, 65),
    "best_of": (0, -1, 65),
    "max_tokens": (0, -1),
    "min_tokens": (-1,),
    "temperature": (-0.1, 2.1),
    "top_p": (0, -1, 1.1),
    "top_k": (-2,),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
    "repetition_penalty": (0, -1, 101),
    "seed": (2**63,),
    "prompt_logprobs": (-2, 21),
    "priority": (),
    "truncate_prompt_tokens": (0, -2, 2**31),
}
CASES = [
    *((COMPLETION, name, bad) for name, values in NUMBERS.items() for bad in values),
    *((COMPLETION, name, bad) for name in NUMBERS for bad in (2**64, 10**400)),
    *((COMPLETION, name, bad) for name in NUMBERS for bad in ("one", "0x1", [1], {}, 1e400, "nan")),
    *((COMPLETION, name, float(bad)) for name in NUMBERS for bad in ("nan", "inf", "-inf")),
    *((COMPLETION, "logprobs", bad) for bad in (-1, 21, *HUGE, 1.5, "yes")),
    *((CHAT, "top_logprobs", bad) for bad in (-1, 1, 21, *HUGE)),
    *((CHAT, "max_completion_tokens", bad) for bad in (0, -1, 2**64, 1.5)),
    *((COMPLETION, "prompt", bad) for bad in ([], [[]], [[1], []], ["a", []])),
    *((COMPLETION, "prompt", bad) for bad in ([-1], [2**31], [2**63], [10**400], [1.5], ["a", 1])),
    *((COMPLETION, "prompt", bad) for bad in (None, 5, {}, ["a"] * 129, [[1]] * 129, "a" * 10**6)),
    (COMPLETION, "prompt", [1] * 512),
    (COMPLETION, "prompt", "\ud800"),
    (COMPLETION, "stop", [str(i) for i in range(17)]),
    (COMPLETION, "stop", [""]),
    (COMPLETION, "stop", ["x" * 2000]),
    *((COMPLETION, "bad_words", bad) for bad in ("a", [""], ["x" * 2000], ["a"] * 129, [1], [" "])),
    *((COMPLETION, "stop_token_ids", bad) for bad in ([-1], [2**31], [2**63], [1] * 2**18, "a")),
    *((COMPLETION, "allowed_token_ids", bad) for bad in ([], [-1], [2**31], [1] * 2**18)),
    *((COMPLETION, "logit_bias", bad) for bad in ({"-1": 1}, {"99999": 1}, {"a": 1}, {"1": "x"})),
    (COMPLETION, "logit_bias", {"1": float("nan")}),
    (COMPLETION, "logit_bias", {str(i): 1 for i in range(1025)}),
    *((COMPLETION, "cache_salt", bad) for bad in ("", "x" * 129)),
    *((COMPLETION, "user", bad) for bad in (5, ["a"])),
    (COMPLETION, "stream_options", {"include_usage": True}),
    *((CHAT, "messages", bad) for bad in ([], None, "a", [{}], [{"role": "x", "content": "a"}])),
    (CHAT, "messages", CHAT["messages"] * 1025),
    (CHAT, "messages", [{"role": "user", "content": "a" * 10**6}]),
    (CHAT, "chat_template", "{{ 1 }}"),
    (CHAT, "chat_template_kwargs", {"tokenize": True}),
    (CHAT, "chat_template_kwargs", {"chat_template": "{{ 1 }}"}),
    (CHAT, "chat_template_kwargs", {"a": {"b": 1}}),
    (CHAT, "chat_template_kwargs", {f"k{i}": 1 for i in range(33)}),
    (CHAT, "tools", tools(129)),
    (CHAT, "tools", tools(2, "same")),
    (CHAT, "tools", tools(1, "bad name")),
    (CHAT, "tool_choice", "required"),
    (CHAT, "response_format", {"type": "json_schema"}),
    (CHAT, "response_format", schema_format(nested(40))),
    (CHAT, "response_format", schema_format({"type": "nothing"})),
    (CHAT, "response_format", schema_format({"enum": ["x" * 70_000]})),
    (CHAT, "response_format", schema_format({"type": "integer", "minimum": 5, "maximum": 1})),
    *((COMPLETION, "structured_outputs", bad) for bad in (
        {}, {"regex": "("}, {"regex": ""}, {"regex": "a" * 70_000}, {"grammar": "start: nothing"},
        {"regex": "a", "choice": ["b"]}, {"choice": []}, {"choice": [""]}, {"choice": ["a"] * 4097},
        {"json": nested(40)}, {"json": "{"}, {"json": "[1]"}, {"json": "[" * 5000}, {"json": None},
        {"regex": "\ud800"}, {"grammar": 'start: %json {"type": 5}'}, {"json_object": False},
    )),
]  # fmt: skip


def ids(case: object) -> str:
    return json.dumps(case)[:40] if not isinstance(case, int) else str(case)[:20]


def json_body(base: dict, name: str, value: object) -> bytes:
    return json.dumps({**base, name: value}).encode()


@pytest.mark.parametrize(("base", "name", "value"), CASES, ids=ids)
def test_bad_values_are_refused(server: LiveServer, base, name, value):
    path = "/v1/chat/completions" if base is CHAT else "/v1/completions"
    content = json_body(base, name, value)
    found = httpx2.post(
        server.url + path,
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1100


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {}),
    ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}),
    ("/tokenize", {"prompt": "a" * 10**6}),
    ("/tokenize", {"messages": []}),
    ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": [2**63]}),
    ("/detokenize", {"tokens": [10**400]}),
    ("/detokenize", {"tokens": [1] * 513}),
    ("/detokenize", {"tokens": "a"}),
])  # fmt: skip
def test_bad_tokenizer_bodies_are_refused(server: LiveServer, path, body):
    found = httpx2.post(server.url + path, json=body, timeout=60)
    assert found.status_code == 400, found.text
    assert "error" in found.json()


def test_messages_say_what_to_give(server: LiveServer):
    def said(**request) -> str:
        found = httpx2.post(server.url + "/v1/completions", timeout=60, **request)
        assert found.status_code == 400
        return found.json()["error"]["message"]

    assert said(json={"prompt": "a", "temperature": "warm"}) == "temperature: give a number"
    assert "Content-Type: application/json" in said(content=b'{"prompt": "a"}')
    assert "no JSON object" in said(json=[1])


def test_nothing_of_that_hurt_the_engine(server: LiveServer):
    server.wait_idle()
    assert httpx2.get(server.url + "/health", timeout=60).json() == {"status": "ready"}
    assert httpx2.post(server.url + "/v1/completions", json=COMPLETION, timeout=60).is_success


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 100_000, 400),
        (b"\xff\xfe", 400),
        (b'{"prompt":"a","seed":' + b"9" * 10_000 + b"}", 400),
        (b'"text"', 400),
        (b"null", 400),
    ],
)
def test_bad_json(server: LiveServer, content, code):
    found = httpx2.post(
        server.url + "/v1/completions",
        content=content,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    assert found.status_code == code, found.text
    assert "error" in found.json()


def test_body_headers_and_queue_have_limits(folder):
    limits = ServeLimits(
        body_bytes=2000, header_bytes=4000, headers=20, body_seconds=2.0, queued_sequences=3, n=4
    )
    with live_server(make_engine(folder), limits=limits) as small, httpx2.Client(
        base_url=small.url, timeout=60
    ) as http:  # fmt: skip
        assert http.post("/v1/completions", json={"prompt": "a" * 3000}).status_code == 413

        def chunks():
            for _ in range(100):
                yield b" " * 100

        json_type = {"Content-Type": "application/json"}
        streamed = http.post("/v1/completions", content=chunks(), headers=json_type)
        assert streamed.status_code == 413
        many = {f"x-{i}": "1" for i in range(30)}
        assert http.get("/v1/models", headers=many).status_code == 431
        assert http.get("/v1/models", headers={"x": "y" * 3900}).status_code in (400, 431)
        with connect(small) as link:
            link.sendall(raw_post("/v1/completions", COMPLETION)[:-5])
            assert link.recv(65536).startswith(b"HTTP/1.1 408")
        full = http.post("/v1/completions", json={**COMPLETION, "n": 4, "temperature": 1})
        assert full.status_code == 503
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["code"] == "overloaded"
        assert b"rjax:admission_rejections_total" in http.get("/metrics").content
        assert http.get("/health").is_success


def test_limits_are_one_table(capsys: pytest.CaptureFixture[str]):
    table = limits_table(ServeLimits())
    assert table in Path(serve.__file__).with_name("README.md").read_text("utf-8")
    names = [field.name for field in dataclasses.fields(ServeLimits)]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == names
    assert main(["--list-limits", "--limit", "n=3"]) == 0
    assert "| n | 3 | samples of one prompt" in capsys.readouterr().out


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeLimits)])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x", "", "1e300", "1" * 50])
def test_limits_are_checked_themselves(name, value):
    with pytest.raises(InvalidConfigError, match=name):
        ServeLimits.from_options({name: value})


def test_unknown_limits_name_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["--limit", "headrs=3"]) == 2
    assert "'headers'" in capsys.readouterr().err


@pytest.mark.parametrize(("queued", "warns"), [(1, True), (2, False)])
def test_a_queue_smaller_than_the_batch_is_logged(folder, caplog, queued, warns):
    engine = make_engine(folder, max_num_seqs=2)
    limits = ServeLimits(queued_sequences=queued)
    make_service(engine, ServeConfig(model="tiny", limits=limits), zygote=zygote()).close()
    assert (
        "queued_sequences is 1, so the batch never has max_num_seqs = 2" in caplog.text
    ) == warns


@pytest.mark.thorough
def test_a_burst_waits_for_its_texts(server: LiveServer):
    """As many requests as the queue takes, all at once, with texts that workers tokenise."""
    body = {**COMPLETION, "prompt": "ab " * 200, "truncate_prompt_tokens": 4, "max_tokens": 1}
    burst = [Arrival(0.0, "/v1/completions", body)] * 400
    host, port = server.url.removeprefix("http://").split(":")
    answers = asyncio.run(stream_load(Address(host, int(port)), burst, time.perf_counter()))
    assert Counter(answer.status for answer in answers) == {200: 400}
    limits = ServeLimits()
    assert limits.queued_texts >= limits.queued_sequences
