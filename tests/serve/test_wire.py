"""Streams are written to the connection: framing, kept connections, readers that are slow."""

import asyncio
import http.client
import json
import socket
import time
from typing import Any

import httpx2
import pytest

from rjax.serve.api.app import build_app
from rjax.serve.http.wire import SendWire

from .live_server import LiveServer

BODY: dict[str, Any] = {"prompt": "Who?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def request(
    body: dict[str, Any], version: str = "1.1", more: str = "", path: str = "/v1/completions"
) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def text_of(stream: bytes) -> str:
    *events, end = stream.decode().split("\n\n")
    assert (events.pop(), end) == ("data: [DONE]", "")
    return "".join(
        choice["text"]
        for event in events
        for choice in json.loads(event.removeprefix("data: "))["choices"]
    )


@pytest.fixture(scope="module")
def text(server: LiveServer) -> str:
    answer = httpx2.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    return answer.json()["choices"][0]["text"]


def test_requests_that_are_sent_ahead_get_whole_streams_in_order(server: LiveServer, text: str):
    stream = BODY | {"stream": True}
    bodies = [stream, BODY, stream | {"max_tokens": 3}, stream]
    with connect(server) as link:
        link.sendall(b"".join(map(request, bodies)))
        for body in bodies:  # without a buffer, which would take the next answer's bytes
            answer = http.client.HTTPResponse(link)
            answer.fp = link.makefile("rb", 0)  # pyright: ignore[reportAttributeAccessIssue]
            answer.begin()
            data = answer.read()
            if body.get("stream"):
                assert answer.getheader("Transfer-Encoding") == "chunked"
                assert answer.getheader("Content-Length") is None
                assert text.startswith(text_of(data))
            else:
                assert json.loads(data)["choices"][0]["text"] == text


def test_a_client_of_http_1_0_gets_no_chunks(server: LiveServer, text: str):
    with connect(server) as link:
        link.sendall(request(BODY | {"stream": True}, "1.0"))
        data = b""
        while part := link.recv(65536):
            data += part
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"chunked" not in head.lower()
    assert text_of(body) == text


def test_close_is_kept_after_a_stream(server: LiveServer, text: str):
    with connect(server) as link:
        link.sendall(request(BODY | {"stream": True}, more="Connection: close\r\n"))
        answer = http.client.HTTPResponse(link)
        answer.begin()
        assert text_of(answer.read()) == text
        assert link.recv(1) == b""


RESPONSE: dict[str, Any] = {"input": "Who?", "max_output_tokens": 12, "temperature": 0,
                            "ignore_eos": True}  # fmt: skip


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The events of a response, in order."""
    *events, end = stream.decode().split("\n\n")
    assert end == ""
    found = [json.loads(event.partition("\ndata: ")[2]) for event in events]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


@pytest.mark.thorough
def test_a_slow_reader_of_a_response_gets_everything(server: LiveServer):
    body = RESPONSE | {"max_output_tokens": 60, "top_logprobs": 20,
                       "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = httpx2.post(f"{server.url}/v1/responses", json=body, timeout=60).json()
    [expected] = whole["output"][0]["content"]
    with connect(server) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(request(body | {"stream": True}, path="/v1/responses"))
        time.sleep(1.0)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # read on at full speed
        answer = http.client.HTTPResponse(link)
        answer.begin()
        events = events_of(answer.read())
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    last = events[-1]["response"]
    [part] = last["output"][0]["content"]
    assert "".join(event["delta"] for event in deltas) == part["text"] == expected["text"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
    assert len(part["logprobs"]) == 60
    stored = httpx2.get(f"{server.url}/v1/responses/{last['id']}", timeout=60)
    assert stored.json() == last


@pytest.mark.thorough
def test_a_slow_reader_gets_everything(server: LiveServer):
    """Its outputs wait in the queue, joined, while its buffers are full."""
    body = BODY | {"max_tokens": 200, "n": 4, "temperature": 1, "seed": 5, "logprobs": 20}
    url = f"{server.url}/v1/completions"
    whole = httpx2.post(url, json=body, timeout=60).json()["choices"]
    with connect(server) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.sendall(request(body | {"stream": True}))
        time.sleep(1.0)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)  # read on at full speed
        answer = http.client.HTTPResponse(link)
        answer.begin()
        events = answer.read().decode().split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for i, expected in enumerate(whole):
        own = [choice for choice in choices if choice["index"] == i]
        assert "".join(choice["text"] for choice in own) == expected["text"]
        tokens = [token for choice in own for token in choice["logprobs"]["tokens"]]
        assert tokens == expected["logprobs"]["tokens"]


async def answer_of_messages(
    server: LiveServer, body: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """The ASGI messages of the server's app, to a request whose scope offers no wire."""
    content = json.dumps(body).encode()
    sent: list[dict[str, Any]] = []
    whole = asyncio.Event()
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await whole.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        await asyncio.sleep(0.001)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "server": ("a", 80),
        "client": ("b", 1),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await build_app(server.service)(scope, receive, send)
    return sent


def test_other_servers_get_messages(server: LiveServer, text: str):
    asked = asyncio.run_coroutine_threadsafe(
        answer_of_messages(server, BODY | {"stream": True}), server.loop
    )
    start, *bodies = asked.result(60)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert text_of(b"".join(message["body"] for message in bodies)) == text


@pytest.mark.parametrize("more", [{}, {"background": True}])
def test_other_servers_get_messages_of_responses(server: LiveServer, more: dict[str, Any]):
    whole = httpx2.post(f"{server.url}/v1/responses", json=RESPONSE, timeout=60).json()
    asked = asyncio.run_coroutine_threadsafe(
        answer_of_messages(server, RESPONSE | more | {"stream": True}, "/v1/responses"), server.loop
    )
    _, *bodies = asked.result(60)
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    last = events_of(b"".join(message["body"] for message in bodies))[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]


def test_messages_wait_for_a_slow_send():
    async def run() -> None:
        sent: list[bytes] = []
        may_send, resumed = asyncio.Event(), []

        async def send(message: Any) -> None:
            await may_send.wait()
            sent.append(message["body"])

        wire = SendWire(send)
        wire.on_resume(lambda: resumed.append(len(sent)))
        sending = asyncio.ensure_future(wire.send_all())
        wire.write(b"a")
        await asyncio.sleep(0)
        wire.write(b"b" * 70_000)
        await asyncio.sleep(0.01)
        assert (wire.is_paused, sent, resumed) == (True, [], [])
        wire.write(b"c")
        wire.end()
        may_send.set()
        await sending
        assert sent == [b"a", b"b" * 70_000 + b"c"]
        assert (wire.is_paused, resumed) == (False, [1])

    asyncio.run(run())


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(server):
    """A proxy in front may believe the other length, and take the rest for a request."""
    smuggled = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n"
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        f"Content-Length: {5 + len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with connect(server) as connection:
        connection.sendall(head.encode() + smuggled)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert b"both Content-Length and Transfer-Encoding" in answer
