"""The app of the server's process: sends each request to a replica and relays its response."""

import asyncio
import contextlib
import dataclasses
import json
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, runtime_checkable

from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rjax.replicas.gateway_metrics import GatewayMetrics
from rjax.replicas.merged_metrics import merge_expositions
from rjax.replicas.prefix_blocks import prefix_blocks
from rjax.replicas.replica_client import ReplicaAnswer, ReplicaLostError
from rjax.replicas.replica_request import ReplicaRequest
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.disconnect import on_disconnect, set_probe, wait_for_disconnect
from rjax.serve.http.request_limits import RequestLimitsMiddleware
from rjax.serve.http.wire import Wire, offered_wire
from rjax.serve.protocol.errors import ApiError, error_body, error_response
from rjax.serve.protocol.responses import METRICS_TYPE, HealthResponse, LoadResponse
from rjax.serve.protocol.value_count import at_most_values
from rjax.serve.telemetry.refusal_log import RefusalLog

_ATTEMPTS = 3  # of a request whose replica dies before its first output
_PAUSE = 0.1  # seconds before another attempt, so that Ray notices
_COMMENT = b":\n\n"
_EVENT_END = b"\n\n"
_SMALL = 32 * 2**10  # bytes; smaller bodies are parsed on the event loop
_SECONDS = 5.0  # for figures of all replicas
_ID_HEX = 32  # digits of a response id after the replica's tag
_log = logging.getLogger("rjax.serve")


@runtime_checkable
class Replicas(Protocol):
    """The interface of the fleet for the gateway."""

    @property
    def num_running(self) -> int:
        """Number of running replicas."""
        ...

    def ask(self, request: ReplicaRequest) -> AbstractAsyncContextManager[ReplicaAnswer]:
        """The response of the replica that the router chooses. Leaving the block cancels.

        Raises:
            ReplicaLostError: the replica died.
            ApiError: no replica takes the request.
        """
        ...

    async def ask_all(self, method: str, seconds: float) -> list[Any]:
        """The results of a method of all replicas that answer in time."""
        ...


class Gateway:
    """ASGI app over replicas, with the routes, limits and errors of a server alone.

    A request whose replica dies before the first byte of its body is sent again, to another
    replica. After that its client gets an error event in a stream, else a closed connection.

    /health is 200 while a replica runs. /metrics and /load cover all replicas. Named prefixes
    are those of ``--prefix-file``: registering one would reach one replica only, so it is refused.

    Args:
        replicas: replicas to send requests to.
        serve: configuration of the server.
        metrics: this gateway's metrics.

    Attributes:
        num_live: number of requests under way.
        draining: refuse new requests.
    """

    def __init__(
        self,
        replicas: Replicas,
        *,
        serve: ServeConfig,
        metrics: GatewayMetrics,
    ) -> None:
        self.num_live = 0
        self.draining = False
        self._replicas = replicas
        self._keys = KeyRing(serve.keys)
        self._limits = limits = serve.limits
        self._http = http = serve.http
        self._metrics = metrics
        self._large_bodies = asyncio.Semaphore(1)
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborted = asyncio.Event()
        self._app: ASGIApp = RequestLimitsMiddleware(
            self._answer,
            limits,
            self._keys,
            rejected=metrics.rejected,
            health_paths=http.health_paths,
            page_paths=http.page_paths,
            refused=RefusalLog(),
        )
        if http.allowed_origins:
            self._app = CORSMiddleware(self._app, **http.cors)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)

    def abort(self) -> None:
        """Cut off all requests under way, and refuse new ones."""
        self.draining = True
        self._aborted.set()

    async def wait_idle(self) -> None:
        """Return when no request is under way."""
        await self._idle.wait()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(self._http.root_path)
        get = scope["method"] == "GET"
        if path in ("/health", "/ping"):
            await self._health()(scope, receive, send)
        elif self.draining:
            self._metrics.rejected("draining")
            await self._refuse("the server is shutting down; ask another one")(scope, receive, send)
        elif get and path == "/metrics":
            await (await self._all_metrics())(scope, receive, send)
        elif get and path == "/load":
            live = await self._replicas.ask_all("num_live", _SECONDS)
            response = JSONResponse(LoadResponse(server_load=sum(live)).model_dump())
            await response(scope, receive, send)
        elif path.startswith("/v1/prefixes") and not get:
            error = ApiError(
                404,
                "a server with several replicas registers no prefixes; start it with "
                "--prefix-file, or rely on automatic prefix caching",
                code="disabled",
            )
            await error_response(error, self._limits.retry_after)(scope, receive, send)
        else:
            self.num_live += 1
            self._idle.clear()
            try:
                await self._relay(path, scope, receive, send)
            finally:
                self.num_live -= 1
                if not self.num_live:
                    self._idle.set()

    async def _relay(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _whole_body(receive)
        tag, blocks = await self._routing(path, body, self._tenant(scope))
        request = ReplicaRequest(scope, body, blocks, tag)
        sending = asyncio.ensure_future(self._send(request, path, send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        aborted = asyncio.ensure_future(self._aborted.wait())
        on_disconnect(scope, sending.cancel)
        tasks = (sending, gone, aborted)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(found[0], Exception) and not isinstance(found[0], OSError):
            raise found[0]

    async def _routing(self, path: str, body: bytes, tenant: str) -> tuple[str, tuple[bytes, ...]]:
        """The tag of the replica that must answer ("" if any may) and the blocks of the prompt.

        Large bodies are parsed on a thread, one at a time, as a server alone does.
        """
        given = path, body, tenant, self._limits.body_values
        if len(body) <= _SMALL:
            return _read_routing(*given)
        async with self._large_bodies:
            return await asyncio.to_thread(_read_routing, *given)

    async def _send(self, request: ReplicaRequest, path: str, send: Send) -> None:
        """Relay the response of the first replica that does not die before its first output."""
        response = _RelayedResponse(request.scope, send)
        for number in range(_ATTEMPTS):
            attempt = dataclasses.replace(request)
            try:
                async with self._replicas.ask(attempt) as answer:
                    self._metrics.routed(attempt.routed_by)
                    answer.headers.append((b"x-replica", attempt.chosen.encode()))
                    await response.relay(answer)
                return
            except ReplicaLostError as error:
                if response.begun:
                    self._metrics.replica_died("lost")
                    _log.warning("a replica died during a response: %s", error)
                    await response.fail(path)
                    return
                self._metrics.replica_died("retried")
                _log.warning("attempt %d of a request: its replica died: %s", number + 1, error)
                request.avoided |= {attempt.chosen}
                await asyncio.sleep(_PAUSE * number)
            except ApiError as error:
                await response.replace(error_response(error, self._limits.retry_after))
                return
        failure = ApiError(503, "the replicas of this request died", code="engine_dead")
        await response.replace(error_response(failure, self._limits.retry_after))

    def _health(self) -> Response:
        running = self._replicas.num_running
        status = "draining" if self.draining else "ready" if running else "starting"
        code = 200 if status == "ready" else 503
        return JSONResponse(HealthResponse(status=status).model_dump(exclude_none=True), code)

    async def _all_metrics(self) -> Response:
        found = await self._replicas.ask_all("metrics", _SECONDS)
        own = self._metrics.exposition(self._replicas.num_running)
        return Response(own + merge_expositions(found), media_type=METRICS_TYPE)

    def _refuse(self, message: str) -> Response:
        return error_response(ApiError(503, message, code="overloaded"), self._limits.retry_after)

    def _tenant(self, scope: Scope) -> str:
        given = (v.decode("latin-1") for k, v in scope["headers"] if k == b"authorization")
        with contextlib.suppress(ApiError):  # the page needs no key
            return self._keys.tenant(next(given, None)).name
        return ""


class _RelayedResponse:
    """Relays a response. Its start waits for the first byte of the body, so that the request can
    be sent again until then.

    Args:
        scope: the request's ASGI scope.
        send: the ASGI ``send`` of the client's connection.

    Attributes:
        begun: whether anything was sent.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.begun = False
        self._scope = scope
        self._send = send
        self._events = False
        self._last = _EVENT_END  # bytes that were relayed

    async def relay(self, answer: ReplicaAnswer) -> None:
        """Send the whole response.

        Raises:
            ReplicaLostError: the replica died.
        """
        part = await answer.read()
        kind = dict(answer.headers).get(b"content-type", b"")
        self._events = kind.startswith(b"text/event-stream")
        self.begun = True
        await self._send(
            {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
        )
        wire = offered_wire(self._scope) if self._events else None
        if wire is not None:
            await self._write(part, answer, wire)
        else:
            while part:
                self._last = part
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                part = await answer.read()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, part: bytes, answer: ReplicaAnswer, wire: Wire) -> None:
        """Write the body as it comes, and no faster than the client reads."""
        resumed = asyncio.Event()
        wire.on_resume(resumed.set)

        def probe() -> None:
            if self._last.endswith(_EVENT_END):
                wire.write(_COMMENT)

        set_probe(self._scope, probe)
        while part:
            self._last = part
            wire.write(part)
            while wire.is_paused:
                resumed.clear()
                await resumed.wait()
            part = await answer.read()

    async def fail(self, path: str) -> None:
        """End a stream of events by an error; other responses are cut off."""
        if not self._events:
            raise ConnectionAbortedError("the replica died")
        data = json.dumps(error_body(503, "the replica of this request died", "engine_dead"))
        name = "event: error\n" if path == "/v1/responses" else ""
        end = "" if self._last.endswith(_EVENT_END) else "\n\n"  # of an event that was cut off
        await self._send(
            {
                "type": "http.response.body",
                "body": f"{end}{name}data: {data}\n\n".encode(),
                "more_body": False,
            }
        )

    async def replace(self, response: Response) -> None:
        """Send another response, if none has begun."""
        if self.begun:
            raise ConnectionAbortedError("the response had begun")

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        await response({"type": "http", "method": "POST"}, receive, self._send)


async def _whole_body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _read_routing(path: str, body: bytes, tenant: str, most: int) -> tuple[str, tuple[bytes, ...]]:
    """See `Gateway._routing`. The replica refuses bodies that are not read here."""
    fields: Any = None
    if body and at_most_values(body, most):
        with contextlib.suppress(ValueError):
            fields = from_json(body, allow_inf_nan=True, cache_strings=False)
    fields = fields if isinstance(fields, dict) else {}
    return _tag_of(path, fields), prefix_blocks(path, fields, tenant)


def _tag_of(path: str, fields: dict[str, Any]) -> str:
    """The replica that has the stored response of a request; "" if it needs none."""
    name = ""
    if path.startswith("/v1/responses/"):
        name = path.split("/")[3]
    elif path == "/v1/responses":
        name = str(fields.get("previous_response_id") or "")
    return name[len("resp_") : -_ID_HEX] if name.startswith("resp_") else ""
