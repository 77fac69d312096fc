"""Middleware that limits headers, bodies and concurrent requests."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rjax.serve.config.http_options import HEALTH_PATHS
from rjax.serve.config.limits import ServeLimits
from rjax.serve.http.auth import KeyRing
from rjax.serve.page.files import PAGE_PATHS
from rjax.serve.protocol.errors import ApiError, error_response

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20
_PUBLIC_BYTES = 1024  # of a body that needs no key
_BOTH_LENGTHS = {b"content-length", b"transfer-encoding"}


class RequestLimitsMiddleware:
    """ASGI middleware that reads the whole body within the limits and then runs the app.

    The body of a request without a valid API key is not read, except for health checks and the
    page, whose body is limited to a few bytes. This check only saves work; the routes check the key
    again.

    Args:
        app: called for requests within the limits.
        limits: uses ``body_bytes``, ``bodies_bytes``, ``body_seconds``, ``headers``,
            ``header_bytes`` and ``connections``.
        keys: the server's API keys.
        health_paths: paths that need no key and are exempt from the ``connections`` limit.
        page_paths: paths that need no key.
        rejected: called with the name of a limit for each request that it rejects with a 503.
        refused: called with every error response.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ServeLimits,
        keys: KeyRing,
        rejected: Callable[[str], None],
        health_paths: frozenset[str] = HEALTH_PATHS,
        page_paths: frozenset[str] = PAGE_PATHS,
        refused: Callable[[Scope, ApiError], None] = lambda scope, error: None,
    ) -> None:
        self._app = app
        self._limits = limits
        self._keys = keys
        self._health_paths = health_paths
        self._public_paths = health_paths | page_paths
        self._rejected = rejected
        self._refused = refused
        self._active = 0
        self._body_bytes = 0  # of all active requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A busy server is healthy, so health checks are exempt.
        if self._active >= self._limits.connections and scope["path"] not in self._health_paths:
            self._rejected("connections")
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
        if {name for name, _ in headers} >= _BOTH_LENGTHS:
            # A proxy may take the other one for the end of the body (RFC 9112, 6.3).
            message = "the request has both Content-Length and Transfer-Encoding; send one of them"
            await self._refuse(ApiError(400, message), scope, receive, send)
            return
        public = scope["path"] in self._public_paths
        if not public:
            given = next((v.decode("latin-1") for k, v in headers if k == b"authorization"), None)
            try:
                self._keys.tenant(given)
            except ApiError as error:
                await self._refuse(error, scope, receive, send)
                return
        # The parsed body stays in memory until the request ends, so it counts until then.
        with self._counted() as count:
            try:
                async with asyncio.timeout(limits.body_seconds):
                    most = _PUBLIC_BYTES if public else limits.body_bytes
                    again = _replay(await self._read(headers, receive, count, most), receive)
            except TimeoutError:
                message = f"the body did not arrive within {limits.body_seconds:g} seconds"
                await self._refuse(ApiError(408, message), scope, receive, send)
            except ApiError as error:
                await self._refuse(error, scope, receive, send)
            except ConnectionAbortedError:
                pass
            else:
                await self._app(scope, again, send)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[int], None]]:
        """A function that counts bytes against ``bodies_bytes`` until the end of the block."""
        own = 0

        def count(size: int) -> None:
            nonlocal own
            if self._body_bytes + size > self._limits.bodies_bytes:
                self._rejected("bodies_bytes")
                message = "the bodies of the requests under way are too large; try again later"
                raise ApiError(503, message, code="overloaded")
            self._body_bytes += size
            own += size

        try:
            yield count
        finally:
            self._body_bytes -= own

    async def _read(
        self,
        headers: list[tuple[bytes, bytes]],
        receive: Receive,
        count: Callable[[int], None],
        most: int,
    ) -> bytes:
        """Read the body, of at most ``most`` bytes; each part is counted before it is stored.

        Raises:
            ApiError: 413, the body is too large; 503, all bodies together are.
            ConnectionAbortedError: the client disconnected.
        """
        too_large = ApiError(413, f"the body is too large; at most {most} bytes are read")
        for name, value in headers:
            # A number with more digits than any limit is too large.
            if name == b"content-length" and (
                len(value) > 15 or not value.isdigit() or int(value) > most
            ):
                raise too_large
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionAbortedError
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise too_large
            count(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        self._refused(scope, error)
        # Closing while the client still sends would reset the connection and lose the response.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await _discard(receive)
        response = error_response(error, self._limits.retry_after)
        response.headers["Connection"] = "close"  # the rest of the body is not read
        await response(scope, receive, send)


async def _discard(receive: Receive) -> None:
    """Read and drop the rest of a body."""
    size = 0
    while size < _LINGER_BYTES:
        message = await receive()
        size += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _replay(body: bytes, receive: Receive) -> Receive:
    """An ASGI ``receive`` that returns the body once and then the connection's own messages."""
    left = [body]
    del body

    async def again() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return again
