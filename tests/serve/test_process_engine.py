"""A server answers alike, whether its engine runs on a thread or in a process of its own."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from rjax.engine_channel.process_channel import ProcessChannel

from .live_server import LiveServer, live_server
from .process_engine import DOOMED
from .test_state import NEIGHBOURS, PLAIN

pytestmark = pytest.mark.thorough

CHAT = {"messages": [{"role": "user", "content": "Who lives in Peru?"}], "max_tokens": 8}
REFUSED: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"regex": "[^\\s\\S]"}},
    {"prompt": "a" * 5000},
    {"prompt": [10**6]},
    {"allowed_token_ids": [10**6]},
]


@pytest.fixture(scope="module")
def apart(folder, request) -> Iterator[LiveServer]:
    """A server whose engine runs in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(request.config.cache.mkdir("jax")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        channel = ProcessChannel("tests.serve.process_engine:make", {"folder": str(folder)})
        channel.wait_ready()
    with live_server(channel) as found:
        yield found


def answer(server: LiveServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of an answer, or its events, without ids and times."""
    found = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=120)
    if body.get("stream"):
        lines = [x.removeprefix("data: ") for x in found.text.splitlines() if x[:6] == "data: "]
        assert lines.pop() == "[DONE]"
        return found.status_code, _texts([json.loads(line) for line in lines])
    return found.status_code, _lasting(found.json())


def _lasting(value: Any) -> Any:
    """A value without what differs from answer to answer."""
    if isinstance(value, list):
        return [_lasting(item) for item in value]
    if isinstance(value, float):
        return round(value, 4)
    if not isinstance(value, dict):
        return value
    dropped = ("id", "created", "prompt_tokens_details", "system_fingerprint")
    return {name: _lasting(item) for name, item in value.items() if name not in dropped}


def _texts(events: list[dict[str, Any]]) -> dict[int, tuple[str, Any]]:
    """Text and end of each choice; the number of events depends on the reader."""
    found: dict[int, tuple[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        text, end = found.get(choice["index"], ("", None))
        part = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        found[choice["index"]] = text + part, choice["finish_reason"] or end
    return found


@pytest.mark.parametrize("body", NEIGHBOURS, ids=lambda body: "-".join(body))
def test_completions(server: LiveServer, apart: LiveServer, body):
    body = {**PLAIN, "temperature": 1, "seed": 11, **body}
    found = answer(apart, "completions", body)
    assert found == answer(server, "completions", body)
    assert found[0] == 200


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_chats(server: LiveServer, apart: LiveServer, stream, more):
    body = {**CHAT, "temperature": 1, "seed": 11, "stream": stream, **more}
    found = answer(apart, "chat/completions", body)
    assert found == answer(server, "chat/completions", body)
    assert found[0] == 200


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: "-".join(body))
def test_refusals(server: LiveServer, apart: LiveServer, body):
    found = answer(apart, "completions", {**PLAIN, **body})
    assert found == answer(server, "completions", {**PLAIN, **body})
    assert found[0] == 400


def test_a_grammar_that_fails(apart: LiveServer):
    body = {**PLAIN, "temperature": 1, "seed": 3, "structured_outputs": {"regex": DOOMED}}
    body["max_tokens"] = 60
    status, error = answer(apart, "completions", body)
    assert (status, error["error"]["code"]) == (400, "grammar_failed")
    status, found = answer(apart, "completions", {**body, "n": 3})
    assert status == 200
    ends = [(choice["finish_reason"], choice["stop_reason"]) for choice in found["choices"]]
    assert ends == [("stop", None), ("error", "no token fits the grammar"), ("stop", None)]


def test_prefixes_and_figures(apart: LiveServer):
    url = f"{apart.url}/v1/prefixes"
    made = httpx2.post(url, json={"name": "rules", "prompt": "Say what is true. "}, timeout=120)
    assert made.json()["pinned"]
    assert [card["name"] for card in httpx2.get(url, timeout=60).json()["data"]] == ["rules"]
    assert not httpx2.patch(f"{url}/rules", json={"pin": False}, timeout=60).json()["pinned"]
    assert httpx2.delete(f"{url}/rules", timeout=60).status_code == 200
    assert httpx2.get(url, timeout=60).json()["data"] == []
    assert httpx2.get(apart.url + "/health", timeout=60).json()["status"] == "ready"
    figures = httpx2.get(apart.url + "/metrics", timeout=60).text
    assert 'enable_prefix_caching="True"' in figures
    assert "vllm:generation_tokens_total" in figures
