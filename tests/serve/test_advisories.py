"""The classes of security advisories on LLM servers: for each a test, or why it cannot occur.

| # | class | held by |
| --- | --- | --- |
| 1 | unpickling | tests/structure (no pickle, dill, marshal, eval, exec); no socket but HTTP's |
| 2 | malicious checkpoints | tests/models (headers, odd configs, paths of shards); no remote code |
| 3 | regex and grammar bombs | test_bombs_do_not_hold_up_others, test_overload |
| 4 | bad schemas kill the engine | test_limits |
| 4 | caches grow | test_grammar_cache_is_bounded, test_hostile_grammars |
| 5 | chat templates | test_limits (none in a request), test_overload |
| 6 | unbounded numbers | test_limits |
| 7 | not finite or out of range | test_limits, test_minimum_without_a_maximum, tests/sampling |
| 7 | health of a dead engine | test_async_engine, test_dead_engine_is_unhealthy_and_says_little |
| 8 | token ids beyond the logits | test_limits, test_ids_between_tokenizer_and_logits |
| 9 | state left in a slot | test_state, tests/sampling, tests/engine |
| 10 | timing of shared prefixes | test_tenants, test_auth (salts); SHA-256 keys in tests/engine |
| 11 | authentication | test_auth |
| 12 | HTTP: headers, bodies | test_limits, test_hostile_bodies |
| 12 | HTTP: labels | test_metric_labels_are_bounded |
| 13 | fetching URLs | test_no_url_is_ever_fetched |
| 14 | errors that tell too much | test_unexpected_errors_tell_nothing |
| 15 | request ids | test_client_ids_are_not_used |
| 16 | parsers that execute | test_tool_calls (json alone reads); tests/structure |
| 17 | tensors from clients | no field takes one; unknown fields are not read (test_fields) |
| 18 | leaks | test_vanish, test_soak, test_async_engine, tests/engine |
| 19 | clients that are silent, slow or many | test_hostile_clients, test_soak |
"""

import ast
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from rjax.serve.config.limits import ServeLimits
from rjax.structured import compiled_grammar

from .live_server import LiveServer, live_server, make_engine

ROOT = Path(__file__).parents[2]
BODY = {"prompt": "a", "max_tokens": 2, "temperature": 0}


def post(server: LiveServer, body: dict, **more) -> httpx2.Response:
    return httpx2.post(server.url + "/v1/completions", json=body, timeout=60, **more)


def nested_any_of(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


BOMBS = [
    {"regex": "(a+)+b"},
    {"regex": "(a|aa)+$"},
    {"regex": "(x+x+)+y"},
    {"regex": "((a{1,100}){1,100}){1,100}"},
    {"regex": "(.*)" * 500},
    {"regex": "a{1000000}"},
    {"regex": "[a-z]{1,9999}[0-9]{1,9999}"},
    {"grammar": "start: a\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40))},
    {"grammar": "start: start start | \"a\""},
    {"json": nested_any_of(10)},
    {"json": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}},
    {"json": {"$ref": "#"}},
    {"json": {"type": "string", "pattern": "(a+)+$", "maxLength": 10**9}},
    {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    {"json": {"$ref": "file:///etc/passwd"}},
    {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}},
]  # fmt: skip


def test_bombs_do_not_hold_up_others(server: LiveServer):
    assert post(server, BODY).status_code == 200
    with ThreadPoolExecutor(8) as pool:
        bombs = [pool.submit(post, server, {**BODY, "structured_outputs": b}) for b in BOMBS]
        slowest = 0.0
        while not all(bomb.done() for bomb in bombs):
            start = time.monotonic()
            assert httpx2.get(server.url + "/health", timeout=60).status_code == 200
            assert post(server, BODY).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    for bomb, found in zip(BOMBS, bombs, strict=True):
        assert found.result().status_code in (200, 400), (bomb, found.result().text)
    assert slowest < 60
    server.wait_idle()
    assert server.used_bytes() == 0


@pytest.mark.thorough
def test_grammar_cache_is_bounded(folder, monkeypatch):
    monkeypatch.setattr(compiled_grammar, "_SHARED_FOR", 1e9)
    with live_server(make_engine(folder), limits=ServeLimits(grammar_cache=4)) as small:
        for i in range(12):
            body = {**BODY, "structured_outputs": {"regex": f"[ab]{{{i + 1}}}"}}
            assert post(small, body).status_code == 200
        assert len(small.service.grammars._kept) <= 4
        assert len(small.service.engine.engine._masks._compiler()._store._kept) == 4


def test_dead_engine_is_unhealthy_and_says_little(folder, monkeypatch):
    engine = make_engine(folder)
    with live_server(engine) as small:

        def broken():
            raise RuntimeError("device lost at 0x7f00")

        monkeypatch.setattr(engine, "step", broken)
        found = post(small, BODY)
        assert found.status_code == 503
        assert "0x" not in found.text
        assert httpx2.get(small.url + "/health", timeout=60).json() == {"status": "dead"}
        assert httpx2.get(small.url + "/health", timeout=60).status_code == 503
        assert post(small, BODY).status_code == 503
        assert httpx2.get(small.url + "/metrics", timeout=60).status_code == 503


# The last two are beyond the model's length.
@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("minimum", [1, pytest.param(600, marks=pytest.mark.slow), 2**31 - 1])
def test_minimum_without_a_maximum(server: LiveServer, minimum):
    body = {"messages": [{"role": "user", "content": "a"}], "min_tokens": minimum, "top_k": 1}
    found = httpx2.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 200
    assert found.json()["usage"]["completion_tokens"] >= min(minimum, 400)
    assert httpx2.get(server.url + "/health", timeout=60).json() == {"status": "ready"}
    assert post(server, BODY).status_code == 200


def test_ids_between_tokenizer_and_logits(server: LiveServer):
    """The logits are wider than the tokenizer: above them no id is anybody's."""
    tokenizer = server.service.tokenizer.vocab_size
    logits = server.service.engine.engine.model_config.vocab_size
    assert tokenizer < logits
    for name, value in (
        ("allowed_token_ids", [logits]),
        ("stop_token_ids", [logits]),
        ("logit_bias", {str(logits): 1}),
        ("prompt", [logits]),
    ):
        assert post(server, {**BODY, name: value}).status_code == 400
    between = post(server, {**BODY, "allowed_token_ids": [logits - 1], "logprobs": 1})
    assert between.status_code == 200
    assert between.json()["choices"][0]["text"] == ""


def test_metric_labels_are_bounded(server: LiveServer):
    def names() -> set[str]:
        text = httpx2.get(server.url + "/metrics", timeout=60).text
        return {line.rsplit(" ", 1)[0] for line in text.splitlines() if line[0] != "#"}

    post(server, BODY)
    before = names()
    for i in range(20):
        httpx2.request(f"BREW{i}", server.url + f"/path{i}", timeout=20)
        post(server, {**BODY, "model": f"model{i}", "user": f"user{i}"})
        post(server, {**BODY, "user": f"user{i}"}, headers={"User-Agent": f"agent{i}"})
    assert names() == before


def test_no_url_is_ever_fetched(server: LiveServer):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.5)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        image = [{"type": "image_url", "image_url": {"url": url}}]
        for content in (image, url):
            httpx2.post(
                server.url + "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": content}], "max_tokens": 1},
                timeout=60,
            )
        post(server, {**BODY, "structured_outputs": {"json": {"$ref": url}}})
        post(server, {**BODY, "prompt": url})
        with pytest.raises(TimeoutError):
            trap.accept()


def test_the_server_imports_no_http_client():
    clients = {"httpx", "httpx2", "requests", "urllib", "urllib3", "aiohttp", "http"}
    for path in (ROOT / "rjax" / "serve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & clients, path


def test_unexpected_errors_tell_nothing(server: LiveServer, monkeypatch):
    secret = "/home/someone/secret at 0x7f00deadbeef"

    def broken(*arguments, **options):
        raise RuntimeError(secret)

    engine = server.service.engine.engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "add_request", broken)
        found = post(server, BODY)
        assert found.status_code == 500
        assert set(found.json()) == {"error"}
        for part in ("secret", "0x", "/home", "Traceback", "RuntimeError", ".py"):
            assert part not in found.text
        streamed = post(server, {**BODY, "stream": True})
        assert "secret" not in streamed.text
    assert post(server, BODY).status_code == 200
    server.wait_idle()


def test_client_ids_are_not_used(server: LiveServer):
    headers = {"X-Request-Id": "same-for-all"}
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: post(server, BODY, headers=headers), range(12)))
    assert all(f.status_code == 200 for f in found)
    assert len({f.json()["id"] for f in found}) == 12
    given = post(server, {**BODY, "request_id": "mine"})
    assert given.status_code == 200
    assert "mine" not in given.text


def test_loopback_is_the_default():
    from rjax.commands.serve.options import address, build_parser

    found = address(build_parser().parse_args([]))
    assert (found.host, found.is_private) == ("127.0.0.1", True)
