"""HTTP between the gateway and a replica: what passes, who may ask, what counts as lost."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from rjax.replicas.gateway import Gateway
from rjax.replicas.gateway_metrics import GatewayMetrics
from rjax.replicas.replica_app import SECRET_HEADER, ReplicaApp
from rjax.replicas.replica_client import ReplicaAnswer, ReplicaClient, ReplicaLostError
from rjax.replicas.replica_request import ReplicaRequest
from rjax.serve.config.addresses import HostAddress
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.server import Server
from rjax.serve.http.starting_app import StartingApp
from rjax.serve.protocol.errors import ApiError

SECRET = "the-gateway-alone-knows-it"
CONFIG = ServeConfig(model="m")


class Backend:
    """A service that does nothing."""

    failed = False
    num_live = 0

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def log_throughput(self, interval: float) -> None: ...
    def close(self) -> None: ...

    async def drain(self, seconds: float) -> bool:
        return True


@contextlib.asynccontextmanager
async def serving(outer: StartingApp, app: ASGIApp) -> AsyncGenerator[str]:
    """The URL of a server on this event loop."""
    ready = asyncio.Event()
    server = Server(outer, lambda: (Backend(), app), ready=ready.set)
    address = HostAddress("127.0.0.1", 0)
    with address.bound() as listener:
        running = asyncio.ensure_future(server.run_on(listener))
        await asyncio.wait_for(ready.wait(), 60)
        try:
            yield address.url(listener)
        finally:
            server.should_exit = True
            await running


@contextlib.asynccontextmanager
async def replica(
    app: ASGIApp, failed: Callable[[], bool] = lambda: False, secret: str = SECRET
) -> AsyncGenerator[tuple[str, ReplicaClient]]:
    """A replica's server and a client."""
    client = ReplicaClient(secret)
    async with serving(ReplicaApp(CONFIG, SECRET, failed), app) as url:
        try:
            yield url, client
        finally:
            await client.close()


def request(method="POST", path=b"/v1/completions", query=b"", headers=(), body=b""):
    scope = {"method": method, "path": path.decode(), "raw_path": path, "query_string": query}
    return ReplicaRequest(scope | {"headers": list(headers)}, body)


async def whole(answer: ReplicaAnswer) -> bytes:
    parts = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


class Echo:
    """Keeps what it was asked, and answers with its headers and body twice."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = [(b"x-a", b"1"), (b"x-a", b"2"), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 418, "headers": headers})
        for _ in range(2):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize("size", [0, 5, 3 * 2**20])
def test_a_request_and_its_response_pass_as_they_are(size):
    app = Echo()
    sent = [(b"x-mine", b"a"), (b"x-mine", "é".encode()), (b"accept", b"*/*")]
    hop = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1")]
    hop += [(b"content-length", b"7"), (SECRET_HEADER, b"mine")]

    async def run() -> tuple[int, list[Any], bytes]:
        async with replica(app) as (url, client):
            asked = request("PUT", b"/a%2Fb/%C3%A9", b"q=%20+&r", [*sent, *hop], b"x" * size)
            async with client.ask(url, asked) as answer:
                return answer.status, answer.headers, await whole(answer)

    status, headers, body = asyncio.run(run())
    assert (status, body) == (418, b"x" * size * 2)
    assert [value for name, value in headers if name == b"x-a"] == [b"1", b"2"]
    assert not {name for name, _ in headers} & {b"transfer-encoding", b"connection"}
    (scope,) = app.scopes
    assert (scope["method"], scope["raw_path"]) == ("PUT", b"/a%2Fb/%C3%A9")
    assert scope["query_string"] == b"q=%20+&r"
    got = [(n, v) for n, v in scope["headers"] if n not in (b"host", b"content-length")]
    assert got == [*sent, (SECRET_HEADER, SECRET.encode())]


def test_requests_after_one_another_share_a_connection():
    app = Echo()

    async def run() -> None:
        async with replica(app) as (url, client):
            for _ in range(3):
                async with client.ask(url, request()) as answer:
                    await whole(answer)

    asyncio.run(run())
    assert len({scope["client"] for scope in app.scopes}) == 1


def test_only_the_gateway_is_answered():
    app = Echo()

    async def run() -> int:
        async with (
            replica(app, secret="a-guess") as (url, client),
            client.ask(url, request("GET", b"/health")) as answer,
        ):
            return answer.status

    assert asyncio.run(run()) == 403
    assert not app.scopes


def test_a_target_that_is_no_path_is_not_found():
    async def run() -> None:
        async with replica(Echo()) as (url, client):
            with pytest.raises(ApiError, match="no path"):
                async with client.ask(url, request("OPTIONS", b"*")):
                    pass

    asyncio.run(run())


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    raise ConnectionAbortedError


@contextlib.asynccontextmanager
async def nobody() -> AsyncGenerator[int]:
    """A port that is taken, and on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("kind", ["nobody", "failed", "broken"])
def test_a_lost_replica(kind):
    async def run() -> None:
        async with (
            nobody() as port,
            replica(broken, lambda: kind == "failed") as (url, client),
        ):
            address = f"http://127.0.0.1:{port}" if kind == "nobody" else url
            with pytest.raises(ReplicaLostError):
                async with client.ask(address, request()) as answer:
                    await whole(answer)

    asyncio.run(run())


class Stream:
    """Events without end, until the client disconnects."""

    def __init__(self, most: int = 2**62) -> None:
        self.sent = 0
        self.most = most
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while self.sent < self.most:
                body = b"data: " + b"%d" % self.sent * 2000 + b"\n\n"
                self.sent += 1
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
                gone = asyncio.ensure_future(receive())
                await asyncio.sleep(0)
                if gone.done() and gone.result()["type"] == "http.disconnect":
                    return
                gone.cancel()
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.ended.set()


def test_leaving_a_response_ends_it_in_the_replica():
    async def run() -> None:
        app = Stream()
        async with replica(app) as (url, client):
            async with client.ask(url, request()) as answer:
                assert await answer.read()
            await asyncio.wait_for(app.ended.wait(), 60)

    asyncio.run(run())


class One:
    """A fleet of one replica."""

    num_running = 1

    def __init__(self, url: str, client: ReplicaClient) -> None:
        self._url, self._client = url, client

    @contextlib.asynccontextmanager
    async def ask(self, request: ReplicaRequest) -> AsyncGenerator[ReplicaAnswer]:
        async with self._client.ask(self._url, request) as answer:
            yield answer

    async def ask_all(self, method: str, seconds: float) -> list[Any]:
        return []


@pytest.mark.thorough
def test_a_slow_reader_slows_its_replica_and_gets_every_event():
    app = Stream(4000)  # 20 to 32 MB

    async def run() -> bytes:
        async with replica(app) as (url, client):
            gateway = Gateway(One(url, client), serve=CONFIG, metrics=GatewayMetrics("m"))
            async with serving(StartingApp(CONFIG), gateway) as front:
                host, _, port = front.removeprefix("http://").partition(":")
                reader, writer = await asyncio.open_connection(host, int(port), limit=2**26)
                writer.transport.pause_reading()
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n")
                writer.write(b"Connection: close\r\n\r\n{}")
                seen = -1
                while seen != app.sent or not seen:
                    seen = app.sent
                    await asyncio.sleep(0.5)
                assert app.sent < 2500
                writer.transport.resume_reading()
                found = await asyncio.wait_for(reader.read(), 60)
                writer.close()
                return found

    found = asyncio.run(run())
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    parts, at = [], 0
    while at < len(body):
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + size + 4
    expected = b"".join(b"data: " + b"%d" % i * 2000 + b"\n\n" for i in range(4000))
    assert b"".join(parts) == expected
