"""The app that listens while the model is loaded, and then delegates to the real app."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal

from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rjax.batch.compile_progress import CompileProgress
from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.auth import KeyRing
from rjax.serve.http.request_ids import with_request_id
from rjax.serve.http.request_limits import RequestLimitsMiddleware
from rjax.serve.page.files import PAGE_PATHS
from rjax.serve.page.routes import page_response
from rjax.serve.protocol.errors import ApiError, error_response
from rjax.serve.protocol.responses import METRICS_TYPE, HealthResponse, ModelList, model_card

type EarlyRequests = Literal["wait", "refuse"]
type EarlyStatus = Literal["starting", "draining", "dead"]

_MAX_HOST = 100  # characters that are shown
_HELD_BYTES = 64 * 2**10  # of a waiting request's body; uvicorn buffers as much


class StartingApp:
    """ASGI app that answers before the model is loaded.

    Until `open` is called, /health and /ping answer 503 with the progress, GET /v1/models answers
    with the served model, GET /metrics has no metrics yet, and the page is served. Other requests
    wait and are then handed to the real app, or get a 503 with Retry-After. A waiting request is
    dropped when its client disconnects. Requests without a valid API key, and more waiting requests
    than the limit ``connections``, are refused at once.

    Args:
        config: the server's configuration; requests to a host that ``http.allowed_hosts`` does not
            allow are refused, before and after `open`.
        early_requests: whether early requests wait or get a 503.
        progress: returns the progress of the compilation, or None before it is known.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        early_requests: EarlyRequests = "wait",
        progress: Callable[[], CompileProgress | None] = lambda: None,
    ) -> None:
        self.limits, self.http = config.limits, config.http
        created = int(time.time()) if config.created is None else config.created
        self._cards = [model_card(name, config.own_name, created, None) for name in config.names]
        self._keys = KeyRing(config.keys, config.operator_keys)
        self._wait_early = early_requests == "wait"
        self._progress = progress
        self._status: EarlyStatus = "starting"
        self._error = ApiError(503, "the server is starting; try again later", code="starting")
        self._decided = asyncio.Event()  # requests wait no longer
        self._waiting = 0
        self._app: ASGIApp | None = None
        self._early: ASGIApp = RequestLimitsMiddleware(
            self._answer,
            self.limits,
            self._keys,
            rejected=lambda _: None,
            health_paths=self.http.health_paths,
            page_paths=self.http.page_paths,
        )
        if self.http.allowed_origins:
            self._early = CORSMiddleware(self._early, **self.http.cors)

    def open(self, app: ASGIApp) -> None:
        """Delegate all requests, including those that wait, to this app."""
        self._app = app
        self._decided.set()

    def fail(self, status: EarlyStatus, error: ApiError) -> None:
        """Answer all requests, including those that wait, with this error."""
        self._status, self._error = status, error
        self._decided.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self.http.request_id_headers and scope["type"] == "http":
            send = with_request_id(scope, send)
        if scope["type"] == "http" and (refusal := self._refused_host(scope)) is not None:
            await refusal(scope, receive, send)
            return
        if self._app is None and self._may_wait(scope):
            self._waiting += 1
            try:
                waited = await self._wait(receive)
            finally:
                self._waiting -= 1
            if waited is None:
                return
            receive = waited
        await (self._app or self._early)(scope, receive, send)

    def _refused_host(self, scope: Scope) -> Response | None:
        if self.http.allowed_hosts is None:
            return None
        given = [v.decode("latin-1") for k, v in scope["headers"] if k == b"host"]
        if all(map(self.http.allows_host, given)):
            return None
        message = (
            f"this server does not answer to the name {given[0][:_MAX_HOST]!r}; start it with "
            "--allowed-hosts, or with API keys, if it should"
        )
        return error_response(ApiError(403, message, code="host_not_allowed"), 0)

    def _may_wait(self, scope: Scope) -> bool:
        if (
            not self._wait_early
            or scope["type"] != "http"
            or self._decided.is_set()
            or self._waiting >= self.limits.connections
            or scope["path"] in self.http.health_paths
            or self._is_get(scope, "/v1/models")
            or self._is_get(scope, "/metrics")
            or self._is_page(scope)
        ):
            return False
        given = (v.decode("latin-1") for k, v in scope["headers"] if k == b"authorization")
        with contextlib.suppress(ApiError):
            self._keys.tenant(next(given, None))
            return True
        return False

    async def _wait(self, receive: Receive) -> Receive | None:
        """Wait for `open` or `fail`; return the ``receive`` of the request, or None if its client
        disconnected."""
        held: list[Message] = []

        async def disconnected() -> None:
            size = 0
            while size < _HELD_BYTES:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                if not held or held[-1].get("more_body", False):
                    held.append(message)
                    size += len(message.get("body", b""))
            await self._decided.wait()  # TCP stops the client until the real app reads the rest

        async def replay() -> Message:
            return held.pop(0) if held else await receive()

        decided = asyncio.ensure_future(self._decided.wait())
        watch = asyncio.ensure_future(disconnected())
        try:
            await asyncio.wait({decided, watch}, return_when=asyncio.FIRST_COMPLETED)
            return replay if decided.done() else None
        finally:
            decided.cancel()
            watch.cancel()
            await asyncio.wait({watch})  # one reader at a time

    def _is_get(self, scope: Scope, path: str) -> bool:
        return scope["method"] == "GET" and scope["path"] in (path, self.http.root_path + path)

    def _is_page(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self.http.page_paths

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(scope)(scope, receive, send)

    def _response(self, scope: Scope) -> Response:
        if scope["path"] in self.http.health_paths:
            progress = self._progress()
            health = HealthResponse(
                status=self._status,
                compiled=None if progress is None else progress.compiled,
                of=None if progress is None else progress.total,
            )
            headers = {"Retry-After": str(self.limits.retry_after)}
            return JSONResponse(health.model_dump(exclude_none=True), 503, headers)
        if self._is_page(scope):
            path = scope["path"]
            return page_response(path if path in PAGE_PATHS else path[len(self.http.root_path) :])
        if self._is_get(scope, "/v1/models"):
            return JSONResponse(ModelList(data=self._cards).model_dump())
        if self._is_get(scope, "/metrics") and self._status == "starting":
            return Response("# The model is being loaded.\n", media_type=METRICS_TYPE)
        return error_response(self._error, self.limits.retry_after)
