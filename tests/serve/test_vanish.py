"""Clients that connect, stream and vanish: afterwards every page is free and health is green."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from rjax.serve.config.addresses import bind
from tests.slow_steps import slow_steps

from .live_server import LiveServer


def vanish(server: LiveServer, seed: int) -> str:
    """One client that goes away at some moment of its request; says which."""
    draw = random.Random(seed)
    body = {
        "prompt": "Who lives in Peru? " * draw.randint(1, 8),
        "max_tokens": draw.choice([1, 20, 50]),
        "ignore_eos": True,
        "temperature": 1,
        "n": draw.choice([1, 1, 3]),
        "stream": draw.random() < 0.7,
    }
    if draw.random() < 0.2:
        body["structured_outputs"] = {"regex": "[a-z]{300}"}
        del body["ignore_eos"]
    if draw.random() < 0.1:
        body["temperature"] = 17  # refused
    content = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    moment = draw.choice(["connect", "head", "body", "first", "some", "end", "end"])
    with socket.create_connection((host, int(port)), timeout=60) as link:
        if moment == "connect":
            return moment
        link.sendall(head + content[: len(content) // 2])
        if moment == "head":
            return moment
        link.sendall(content[len(content) // 2 :])
        if moment == "body":
            time.sleep(draw.random() * 0.2)
            return moment
        if moment in ("first", "some"):
            link.settimeout(2)
            with contextlib.suppress(TimeoutError):  # queued, or answered in full
                for _ in range(1 if moment == "first" else draw.randint(2, 6)):
                    if not link.recv(300):
                        break
            if draw.random() < 0.5:  # a reset in place of a goodbye
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return moment
        link.settimeout(240)
        data = b""
        while not (data.endswith(b"0\r\n\r\n") or (b"\r\n\r\n" in data and b"chunked" not in data)):
            more = link.recv(65536)
            if not more:
                break
            data += more
        return moment


@pytest.mark.slow
def test_vanishing_clients_leave_nothing(server: LiveServer):
    body = {"prompt": "Who lives in Peru?", "max_tokens": 8, "temperature": 0}
    before = httpx2.post(server.url + "/v1/completions", json=body, timeout=60).json()["choices"]
    server.wait_idle()
    assert server.used_bytes() == 0
    with ThreadPoolExecutor(60) as pool:
        moments = list(pool.map(lambda seed: vanish(server, seed), range(200)))
    assert len(set(moments)) == 6
    server.wait_idle(120)
    assert server.used_bytes() == 0
    assert httpx2.get(server.url + "/health", timeout=60).json() == {"status": "ready"}
    stats = server.call(lambda engine: engine.stats())
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    # Texts of clients that are gone may still wait for a worker: until then a 503 says try again.
    deadline = time.monotonic() + 60
    while (answer := httpx2.post(server.url + "/v1/completions", json=body, timeout=60)).is_error:
        assert answer.status_code == 503, answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)
    after = answer.json()["choices"]
    assert after == before


@pytest.fixture
def slowed(server: LiveServer) -> Iterator[None]:
    """To the end, 500 tokens would take a quarter of a minute."""
    with slow_steps(server.service.engine.engine, 0.03):
        yield


@pytest.mark.usefixtures("slowed")
def test_a_gone_client_frees_its_pages_at_once(server: LiveServer):
    server.wait_idle()  # of what tests before left
    engine: Any = server.service.engine.engine
    before = engine.stats().output_tokens
    body = {"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True, "temperature": 1}
    with httpx2.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()  # kept: a generator that is dropped closes the stream
        next(lines)
        assert server.service.engine.num_live == 1
    server.wait_idle()
    assert server.used_bytes() == 0
    # Without a stream there is nobody to write to: the server has to listen.
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(server.url + "/v1/completions", json=body | {"stream": False}, timeout=0.15)
    server.wait_idle()
    assert server.used_bytes() == 0
    assert engine.stats().output_tokens - before < 900, "they went on to the end"


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_connection_aborts_before_its_message(server: LiveServer, monkeypatch, stream):
    """The message ``http.disconnect`` comes late on a busy event loop; here it never does."""

    async def never(receive: Any) -> None:
        await asyncio.Event().wait()

    name = f"rjax.serve.http.{'event_stream' if stream else 'disconnect'}.wait_for_disconnect"
    monkeypatch.setattr(name, never)
    body = {"prompt": "Who?", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as link:
        link.sendall(head.encode() + content)
        end = time.monotonic() + 60
        while server.service.engine.num_live == 0:
            assert time.monotonic() < end
            time.sleep(0.001)
    before = server.call(lambda engine: engine.stats().output_tokens)
    server.wait_idle()
    assert server.call(lambda engine: engine.stats().output_tokens) - before < 300


def test_small_pieces_are_sent_at_once():
    """Without TCP_NODELAY the second piece of a kept connection waits for a delayed ACK."""

    async def connect() -> int:
        accepted = asyncio.get_running_loop().create_future()
        listener = bind("127.0.0.1", 0)
        listener.listen()
        served = await asyncio.start_server(
            lambda _, writer: accepted.set_result(writer), sock=listener
        )
        async with served:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted
            found = writer.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY
            )
            client.close()
            writer.close()
            return found

    assert asyncio.run(connect())
