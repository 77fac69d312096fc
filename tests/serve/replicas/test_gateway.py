"""The gateway over replicas that the tests write: relaying, retries, errors, disconnects."""

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import pytest
from pydantic_core import from_json

from rjax.replicas import gateway as gateway_module
from rjax.replicas.gateway import Gateway
from rjax.replicas.gateway_metrics import GatewayMetrics
from rjax.replicas.replica_client import ReplicaAnswer, ReplicaLostError
from rjax.replicas.replica_request import ReplicaRequest
from rjax.serve.config.http_options import HttpOptions
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.protocol.errors import ApiError

SSE = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]
BODY = {"messages": [{"role": "user", "content": "Who?"}]}


def start(headers=JSON, status: int = 200) -> tuple[int, Any]:
    return status, headers


@dataclasses.dataclass
class Scripted:
    """Replicas that answer the requests by scripts, one after another.

    A script is the start of a response and parts of its body; an exception is raised in its place,
    and an event is waited for.
    """

    scripts: list[list[Any]]
    num_running: int = 2
    asked: list[ReplicaRequest] = dataclasses.field(default_factory=list)
    closed: int = 0
    answers: bool = True

    @contextlib.asynccontextmanager
    async def ask(self, request: ReplicaRequest) -> AsyncGenerator[ReplicaAnswer]:
        self.asked.append(request)
        script = self.scripts.pop(0)
        request.routed_by, request.chosen = "prefix", f"r{len(self.asked)}"

        async def read() -> bytes:
            if not script:
                return b""
            entry = script.pop(0)
            if isinstance(entry, Exception):
                raise entry
            if isinstance(entry, asyncio.Event):
                await entry.wait()
                return b""
            return entry

        try:
            if not isinstance(script[0], tuple):
                await read()
            status, headers = script.pop(0)
            yield ReplicaAnswer(status, list(headers), read)
        finally:
            self.closed += 1

    async def ask_all(self, method: str, seconds: float) -> list[Any]:
        if not self.answers:
            return []
        text = b'# HELP rjax:a A.\n# TYPE rjax:a gauge\nrjax:a{model_name="m"} 1\n'
        return [2, 3] if method == "num_live" else [("r0", text), ("r1", text)]


def gateway(scripts, keys=(), **http) -> tuple[Gateway, Scripted]:
    replicas = Scripted(scripts)
    made = Gateway(
        replicas,
        serve=ServeConfig(model="m", keys=tuple(keys), http=HttpOptions(**http)),
        metrics=GatewayMetrics("m"),
    )
    return made, replicas


def send(app: Gateway, method: str = "POST", path: str = "/v1/chat/completions", **more):
    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", timeout=60
        ) as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def counts(app: Gateway) -> str:
    return app._metrics.exposition(2).decode()


def test_a_response_is_relayed_as_it_is():
    app, replicas = gateway([[start(status=400), b'{"error"', b": 1}"]])
    found = send(app, json=BODY, headers={"x-mine": "1"}, params={"q": "2"})
    assert (found.status_code, found.json()) == (400, {"error": 1})
    (request,) = replicas.asked
    assert json.loads(request.body) == BODY
    assert request.scope["query_string"] == b"q=2"
    assert (b"x-mine", b"1") in request.scope["headers"]
    assert len(request.blocks) == 1
    assert app.num_live == 0
    assert 'routed_requests_total{model_name="m",reason="prefix"} 1.0' in counts(app)


@pytest.mark.parametrize("begun", [[], [start(SSE)]], ids=["nothing", "headers"])
def test_a_request_is_sent_again_before_its_first_output(begun):
    good = [start(SSE), b"data: a\n\n"]
    app, replicas = gateway([[*begun, ReplicaLostError("died")], good])
    found = send(app, json=BODY)
    assert (found.status_code, found.text) == (200, "data: a\n\n")
    assert len(replicas.asked) == replicas.closed == 2
    assert [request.avoided for request in replicas.asked] == [frozenset(), {"r1"}]
    assert found.headers["x-replica"] == "r2"
    assert 'replica_failures_total{model_name="m",outcome="retried"} 1.0' in counts(app)


def test_a_request_is_not_sent_again_for_ever():
    app, replicas = gateway([[ReplicaLostError("died")] for _ in range(3)])
    found = send(app, json=BODY)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_dead")
    assert found.headers["retry-after"]
    assert len(replicas.asked) == 3


@pytest.mark.parametrize(
    ("path", "name"), [("/v1/chat/completions", ""), ("/v1/responses", "event: error\n")]
)
@pytest.mark.parametrize("cut_off", [[b"data: a\n\n"], [b"data:", b" a"]], ids=["whole", "cut"])
def test_a_stream_that_loses_its_replica_ends_by_an_error(path, name, cut_off):
    app, replicas = gateway([[start(SSE), *cut_off, ReplicaLostError("died")]])
    found = send(app, path=path, json=BODY)
    assert found.text.startswith("data: a\n\n" + name + "data: {")
    error = json.loads(found.text.split("data: ")[2])["error"]
    assert (error["code"], error["type"]) == ("engine_dead", "service_unavailable_error")
    assert len(replicas.asked) == 1
    assert 'replica_failures_total{model_name="m",outcome="lost"} 1.0' in counts(app)


def test_a_half_sent_document_is_cut_off():
    """A client would take an error at its end for a part of it."""
    app, _ = gateway([[start(), b'{"a": ', ReplicaLostError("died")]])
    messages = run_raw(app)
    assert [m["type"] for m in messages] == ["http.response.start", "http.response.body"]
    assert messages[-1]["more_body"]


def run_raw(app, leaves_after: int = 10**9) -> list[dict[str, Any]]:
    """Run a request on bare ASGI; its client disconnects after that many messages."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "query_string": b"",
    }
    messages: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive():
        if incoming:
            return incoming.pop()
        while len(messages) < leaves_after:
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def sent(message):
        messages.append(message)

    async def run() -> None:
        with contextlib.suppress(ConnectionAbortedError):
            await asyncio.wait_for(app(scope, receive, sent), 60)

    asyncio.run(run())
    return messages


def test_a_disconnect_ends_the_request_in_its_replica():
    app, replicas = gateway([[start(SSE), b"data: a\n\n", asyncio.Event()]])
    messages = run_raw(app, leaves_after=2)
    assert replicas.closed == 1
    assert app.num_live == 0
    assert len(messages) == 2


def test_an_abort_ends_requests_and_draining_refuses_new_ones():
    app, replicas = gateway([[asyncio.Event()], [start(), b"{}"]])

    async def run() -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", timeout=60
        ) as client:
            asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=BODY))
            while not app.num_live:
                await asyncio.sleep(0.01)
            app.draining = True
            assert (await client.post("/v1/completions", json=BODY)).status_code == 503
            assert 'gateway_rejections_total{model_name="m",reason="draining"} 1.0' in counts(app)
            assert (await client.get("/health")).json() == {"status": "draining"}
            app.abort()
            await asyncio.wait({asking}, timeout=60)
            await asyncio.wait_for(app.wait_idle(), 60)

    asyncio.run(run())
    assert replicas.closed == 1


def test_errors_of_replicas_are_openai_errors():
    app, _ = gateway([[ApiError(503, "no replica takes requests now", code="overloaded")]])
    found = send(app, json=BODY)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "overloaded")


def test_keys_are_checked_here_too():
    app, replicas = gateway([[start(), b"{}"]], keys=["first-key-1234"])
    assert send(app, json=BODY).status_code == 401
    assert send(app, "GET", "/metrics").status_code == 401
    assert send(app, "GET", "/health").json() == {"status": "ready"}
    assert not replicas.asked
    bearer = {"Authorization": "Bearer first-key-1234"}
    assert send(app, json=BODY, headers=bearer).status_code == 200
    assert dict(replicas.asked[0].scope["headers"])[b"authorization"] == b"Bearer first-key-1234"


def test_routes_over_all_replicas():
    app, replicas = gateway([[start(), b"{}"]])
    assert send(app, "GET", "/load").json() == {"server_load": 5}
    text = send(app, "GET", "/metrics").text
    assert 'rjax:a{replica="r1",model_name="m"} 1' in text
    assert 'rjax:num_replicas{model_name="m"} 2.0' in text
    replicas.answers = False  # all busy or starting
    alone = send(app, "GET", "/metrics")
    assert alone.status_code == 200
    assert 'rjax:num_replicas{model_name="m"} 2.0' in alone.text
    found = send(app, json={"name": "p", "prompt": "a"}, path="/v1/prefixes")
    assert (found.status_code, found.json()["error"]["code"]) == (404, "disabled")
    assert not replicas.asked
    assert send(app, "GET", "/v1/prefixes").status_code == 200
    replicas.num_running = 0
    assert send(app, "GET", "/health").status_code == 503


def test_stored_responses_are_asked_of_the_replica_that_has_them():
    name = "resp_" + "ab12cd34" + "0" * 32
    app, replicas = gateway([[start(), b"{}"] for _ in range(5)])
    send(app, "GET", f"/v1/responses/{name}")
    send(app, "GET", f"/v1/responses/{name}/input_items")
    send(app, path="/v1/responses", json={"input": "a", "previous_response_id": name})
    send(app, path="/v1/responses", json={"input": "a previous_response_id"})
    send(app, "GET", "/v1/responses/other")
    assert [request.replica_tag for request in replicas.asked] == ["ab12cd34"] * 3 + ["", ""]


def test_browsers_are_answered_here():
    app, replicas = gateway(
        [[start(), b"{}"]], allowed_origins=("https://a.example",), root_path="/llm"
    )
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    found = send(app, "OPTIONS", headers=asked)
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    assert not replicas.asked
    found = send(
        app, path="/llm/v1/chat/completions", json=BODY, headers={"Origin": asked["Origin"]}
    )
    assert found.headers["access-control-allow-origin"] == "https://a.example"
    assert replicas.asked[0].blocks


RESPONSE = "resp_r1" + "0" * 32


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[]",
        b"[" * 100_000,
        b'"\\ud800"',
        b"\xff",
        b"1e9",
        b'{"input":[' + b"1," * 300_000,
    ],
)
def test_a_body_that_cannot_be_read_is_relayed(body):
    """The replica refuses it."""
    app, replicas = gateway([[start(status=400), b"{}"]])
    assert send(app, path="/v1/responses", content=body).status_code == 400
    (request,) = replicas.asked
    assert (request.body, request.replica_tag, request.blocks) == (body, "", ())


@pytest.mark.parametrize("size", [1, 200_000])
def test_large_bodies_are_parsed_off_the_event_loop_one_at_a_time(monkeypatch, size):
    threads, running, most = [], [0], [0]

    def watched(*given):
        threads.append(threading.current_thread())
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.02)
        found = plain(*given)
        running[0] -= 1
        return found

    plain = gateway_module._read_routing
    monkeypatch.setattr(gateway_module, "_read_routing", watched)
    monkeypatch.setattr(gateway_module, "from_json", _only_inside(running, from_json))
    app, replicas = gateway([[start(), b"{}"] for _ in range(4)])
    body = {"input": "a" * size, "previous_response_id": RESPONSE}

    async def ask() -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://test", timeout=60
        ) as client:
            await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(4)))

    asyncio.run(ask())
    assert most == [1]
    assert {thread is threading.main_thread() for thread in threads} == {size == 1}
    assert [request.replica_tag for request in replicas.asked] == ["r1"] * 4
    assert all(request.blocks for request in replicas.asked)


def _only_inside(running, parse):
    """The parser, where nothing else may parse."""

    def checked(*given, **more):
        assert running[0] == 1
        return parse(*given, **more)

    return checked
