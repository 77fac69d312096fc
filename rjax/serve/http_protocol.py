"""uvicorn's HTTP/1.1 connection, held to the bounds of `rjax.serve.connections`."""

import array
import asyncio
import fcntl
import termios
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rjax.serve.connections import ConnectionLimiter
from rjax.serve.errors import ApiError, error_response

_LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """One connection.

    Args:
        connections: of the server.
        health_paths: that a connection beyond the bounds may ask for.
        retry_after: seconds that a 503 asks the client to wait.
        options: uvicorn's.
    """

    def __init__(
        self,
        connections: ConnectionLimiter,
        health_paths: frozenset[str],
        retry_after: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._open = connections
        self._health_paths = health_paths
        self._retry_after = retry_after
        self._counted: _CountingTransport

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client connected."""
        self._counted = _CountingTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        admission = self._open.open(self, self.client[0] if self.client else None)
        if admission == "refused":
            transport.abort()
        elif admission == "health only":
            self.app = _HealthOnly(self.app, self._health_paths, self._retry_after)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._open.close(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        super().data_received(data)
        self._moved()

    def on_response_complete(self) -> None:
        """A response is written; the next request may have come already."""
        super().on_response_complete()
        self._moved()

    def shut(self) -> None:
        """Close it now; what is not sent is lost."""
        if self._counted.get_write_buffer_size():
            self._counted.abort()
        else:
            self._counted.close()

    def refuse_late_headers(self) -> None:
        """Answer 408 where a part of a request came, and close it."""
        if self.conn.trailing_data[0]:
            self._counted.write(_LATE)
        self.shut()

    def unsent(self) -> tuple[int, int]:
        """Bytes that wait for the client, and bytes that went out in all."""
        waiting = self._counted.get_write_buffer_size()
        return waiting, self._counted.written - waiting

    def has_unread(self) -> bool:
        """Whether bytes of the client have come that the event loop has not read yet."""
        if self._counted.is_closing():
            return False
        count = array.array("i", [0])
        fcntl.ioctl(self._counted.get_extra_info("socket").fileno(), termios.FIONREAD, count)
        return count[0] > 0

    def _moved(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._open.now(self, "busy")
        elif self.cycle is None or self.conn.trailing_data[0]:
            self._open.now(self, "silent")
        else:
            self._open.now(self, "idle")


class _CountingTransport:
    """A transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        """Send, or keep until the client takes it."""
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _HealthOnly:
    """Answers a question for health once, and a 503 to everything else."""

    def __init__(self, app: ASGIApp, health_paths: frozenset[str], retry_after: int) -> None:
        self._app = app
        self._health_paths = health_paths
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and have the connection closed."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if scope["path"] in self._health_paths:
            await self._app(scope, receive, closing)
            return
        error = ApiError(503, "too many connections; try again later", code="overloaded")
        await error_response(error, self._retry_after)(scope, receive, closing)
