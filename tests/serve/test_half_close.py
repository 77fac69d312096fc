"""Clients that shut down their write side get their answers; those that close are aborted."""

import contextlib
import http.client
import json
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from rjax.serve.config.limits import ServeLimits

from .hostile import Stream, ask, connect, ended, raw_post, until
from .live_server import LiveServer
from .test_hostile_clients import slowed

PROMPT = {"max_tokens": 8, "temperature": 0}
COMPLETION = {"prompt": "Who lives in Peru?", **PROMPT}
CHAT = {"messages": [{"role": "user", "content": "Who?"}], **PROMPT}
RESPONSE = {"input": "Who?", "max_output_tokens": 8, "temperature": 0, "store": False}
LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SLOTS = 4
KEEP_ALIVE_SECONDS = ServeLimits().keep_alive_seconds


@contextlib.contextmanager
def half_closed(server: LiveServer, request: bytes) -> Iterator[socket.socket]:
    """A connection that has sent this request and its FIN."""
    with connect(server) as link:
        link.settimeout(60)
        link.sendall(request)
        link.shutdown(socket.SHUT_WR)
        yield link


def read_answer(link: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer, after which the server closes the connection."""
    answer = http.client.HTTPResponse(link)
    answer.begin()  # skips any 100
    status, body = answer.status, answer.read()
    link.settimeout(KEEP_ALIVE_SECONDS / 2)
    assert link.recv(1) == b"", "it does not wait for a next request"
    return status, body


def made(server: LiveServer) -> int:
    """Tokens that the engine has sampled."""
    return server.call(lambda engine: engine.stats().output_tokens)


def without_ids(value: Any) -> Any:
    """An answer without what differs between two of them."""
    if isinstance(value, dict):
        own = {"id", "created", "created_at", "completed_at", "item_id", "usage"}  # cached tokens
        return {k: without_ids(v) for k, v in value.items() if k not in own}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def parts(body: bytes) -> list[Any]:
    """The JSON of an answer, or of the events of a stream."""
    if not body.startswith((b"data:", b"event:", b":")):
        return [without_ids(json.loads(body))]
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n") if line[:5] == b"data:"]
    return [line if line == b"[DONE]" else without_ids(json.loads(line)) for line in lines]


def joined(events: list[Any]) -> list[Any]:
    """Events whose pieces of text are joined: how many tokens share one depends on the reader."""
    texts: defaultdict[str, str] = defaultdict(str)
    others: list[Any] = []
    for event in events:
        if not isinstance(event, dict):
            others.append(event)
        elif "delta" in event:
            texts[event["type"]] += event["delta"]
        elif "sequence_number" in event:
            others.append({k: v for k, v in event.items() if k != "sequence_number"})
        elif event.get("choices") and "message" not in (choice := event["choices"][0]):
            delta = choice.get("delta", {})
            texts["choice"] += choice.get("text") or delta.get("content") or ""
            others += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
        else:
            others.append(event)
    return [dict(texts), *others]


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models", "/load", "/version"])
def test_a_question_is_answered(server: LiveServer, path):
    with half_closed(server, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()) as link:
        status, body = read_answer(link)
    assert (status, json.loads(body)) == (200, ask(server, "GET", path).json)


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/completions", COMPLETION | {"stream": True}),
        ("/v1/completions", COMPLETION | {"use_beam_search": True, "n": 2}),
        ("/v1/completions", COMPLETION | {"max_tokens": 0}),  # refused
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/invocations", CHAT),
        ("/v1/responses", RESPONSE),
        ("/v1/responses", RESPONSE | {"stream": True}),
        ("/tokenize", {"prompt": "Who?"}),
        ("/detokenize", {"tokens": [5, 6]}),
    ],
)
def test_a_slow_answer_is_whole(server: LiveServer, path, body):
    """Slower than the first probes."""
    server.wait_idle()
    expected = ask(server, "POST", path, body)
    with slowed(server, 0.1), half_closed(server, raw_post(path, body)) as link:
        status, found = read_answer(link)
    assert status == expected.status
    both = parts(found), parts(expected.body)
    assert both[0] == both[1] or (joined(both[0]) == joined(both[1]) and body.get("stream"))
    server.wait_idle()


@pytest.mark.thorough
def test_a_prefix_is_registered(server: LiveServer):
    body = {"name": "half", "prompt": "an own prefix " * 20}
    with slowed(server, 0.1), half_closed(server, raw_post("/v1/prefixes", body)) as link:
        status, _ = read_answer(link)
    assert status == 200
    assert ask(server, "DELETE", "/v1/prefixes/half").status == 200


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_waits_in_the_queue_comes(server: LiveServer, stream):
    """What the client gets meanwhile is skipped by every client."""
    server.wait_idle()
    body = COMPLETION | {"stream": stream}
    expected = ask(server, "POST", "/v1/completions", body)
    with slowed(server, 0.02):
        streams = [Stream(server, {**LONG, "max_tokens": 60}) for _ in range(SLOTS)]
        for other in streams:
            assert other.begun.wait(60)
        with half_closed(server, raw_post("/v1/completions", body)) as link:
            until(lambda: server.service.engine.num_live == SLOTS + 1)
            raw = ended(link, 60)
        for other in streams:
            other.join(60)
    assert raw is not None
    skipped = b":\n\n" if stream else b"HTTP/1.1 100 Continue\r\n\r\n"
    assert 1 <= raw.count(skipped) <= 12  # one after 0.05 s, each later one after twice as long
    head, _, sent = raw.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if not stream:
        assert parts(sent) == parts(expected.body)
    else:
        assert sent.endswith(b"0\r\n\r\n") and b"data: [DONE]" in sent


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("where", ["running", "queued"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_is_aborted_at_once(server: LiveServer, stream, where):
    server.wait_idle()
    before = made(server)
    with slowed(server, 0.02):
        streams = [
            Stream(server, {**LONG, "max_tokens": 200})
            for _ in range(SLOTS if where == "queued" else 0)
        ]
        for other in streams:
            assert other.begun.wait(60)
        with connect(server) as link:
            link.sendall(raw_post("/v1/completions", {**LONG, "stream": stream}))
            until(lambda: server.service.engine.num_live == len(streams) + 1)
            time.sleep(0.3)
        until(lambda: server.service.engine.num_live == len(streams))
        assert all(other.is_alive() for other in streams), "it left before it had a row"
        if not streams:
            assert made(server) - before < LONG["max_tokens"] / 2
    for other in streams:
        other.join(60)
        assert other.whole
    server.wait_idle()


@pytest.mark.sample(1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_half_closed_client_that_closes_later_is_aborted(server: LiveServer, stream):
    """The kernel does not say it without a write: the probes do."""
    server.wait_idle()
    before = made(server)
    with slowed(server, 0.02):
        request = raw_post("/v1/completions", {**LONG, "stream": stream})
        with half_closed(server, request) as link:
            until(lambda: server.service.engine.num_live == 1)
            time.sleep(0.3)
            assert server.service.engine.num_live == 1
            if stream:
                link.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while link.recv(65536):  # nothing unread, whose loss would be a reset
                        pass
        until(lambda: server.service.engine.num_live == 0)
        assert made(server) - before < LONG["max_tokens"] / 2


def test_http_1_0_cannot_tell_and_counts_as_gone(server: LiveServer):
    """It has no interim responses; proxies that speak it close when their clients are gone."""
    server.wait_idle()
    before = made(server)
    request = raw_post("/v1/completions", LONG).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with slowed(server, 0.02), half_closed(server, request) as link:
        assert ended(link, 60) == b""
        until(lambda: server.service.engine.num_live == 0)
        assert made(server) - before < LONG["max_tokens"] / 2


def test_half_a_request_and_a_fin_end_the_connection(server: LiveServer):
    with half_closed(server, raw_post("/v1/completions", COMPLETION)[:-5]) as link:
        assert ended(link, 60) is not None
    with half_closed(server, b"GET /health HTTP/1.1\r\nHo") as link:
        assert ended(link, 60) is not None


def test_all_requests_of_a_pipeline_are_answered(server: LiveServer):
    request = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n"
    with half_closed(server, request * 3) as link:
        answer = ended(link, 60)
    assert answer is not None
    assert answer.count(b"HTTP/1.1 200 OK") == 3
