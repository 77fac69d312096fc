"""What a request may weigh before anyone reads it: headers, body, time to arrive."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rjax.serve.auth import KeyRing
from rjax.serve.errors import ApiError, error_response
from rjax.serve.limits import ServeLimits
from rjax.serve.metrics import Metrics

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20


class Intake:
    """ASGI middleware that takes the whole body within its limits, then runs the app.

    Without a valid key no body is read, but for /health, which has none. The routes ask for the key
    again: this check saves work, that one guards.

    Args:
        app: runs on requests that pass.
        limits: ``body_bytes``, ``body_seconds``, ``headers``, ``header_bytes``, ``connections``.
        keys: of the server.
        metrics: count the requests that are too many.
    """

    def __init__(self, app: ASGIApp, limits: ServeLimits, keys: KeyRing, metrics: Metrics) -> None:
        self._app = app
        self._limits = limits
        self._keys = keys
        self._metrics = metrics
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A busy server is healthy: whoever asks for that must not take it for a dead one.
        if self._active >= self._limits.connections and scope["path"] != "/health":
            self._metrics.rejected("connections")
            message = f"{self._active} requests are under way; try again later"
            await self._refuse(ApiError(503, message, code="overloaded"), scope, receive, send)
            return
        self._active += 1
        try:
            await self._admit(scope, receive, send)
        finally:
            self._active -= 1

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._limits
        headers = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > limits.headers or size > limits.header_bytes:
            message = (
                f"{len(headers)} headers of {size} bytes; at most {limits.headers} of "
                f"{limits.header_bytes} bytes are read"
            )
            await self._refuse(ApiError(431, message), scope, receive, send)
            return
        if scope["path"] != "/health":
            given = next((v.decode("latin-1") for k, v in headers if k == b"authorization"), None)
            try:
                self._keys.tenant(given)
            except ApiError as error:
                await self._refuse(error, scope, receive, send)
                return
        try:
            async with asyncio.timeout(limits.body_seconds):
                body = await self._read(headers, receive)
        except TimeoutError:
            message = f"the body did not arrive within {limits.body_seconds:g} seconds"
            await self._refuse(ApiError(408, message), scope, receive, send)
            return
        except ConnectionAbortedError:
            return
        if body is None:
            message = f"the body is too large; at most {limits.body_bytes} bytes are read"
            await self._refuse(ApiError(413, message), scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> bytes | None:
        """The body; None where it is too large."""
        for name, value in headers:
            # More digits than a limit can have are no size that could pass.
            if name == b"content-length" and (
                len(value) > 15 or not value.isdigit() or int(value) > self._limits.body_bytes
            ):
                return None
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            part = message.get("body", b"")
            size += len(part)
            if size > self._limits.body_bytes:
                return None
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        # Closing on a client that still sends would reset the connection and lose the answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await _discard(receive)
        response = error_response(error, self._limits.retry_after)
        response.headers["Connection"] = "close"  # what is left of the body is not read
        await response(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Take what comes of a body and keep none of it."""
    size = 0
    while size < _LINGER_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give the body once, then whatever comes on the connection (a disconnect)."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
