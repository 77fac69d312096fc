"""uvicorn's HTTP/1.1 protocol with the limits of `rjax.serve.http.connections`."""

import array
import asyncio
import fcntl
import termios
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from rjax.serve.http.connections import ConnectionLimiter
from rjax.serve.http.disconnect import Disconnect
from rjax.serve.http.half_close import HalfClosedConnection
from rjax.serve.http.loop_turns import LoopTurns
from rjax.serve.http.wire import offer_wire
from rjax.serve.protocol.errors import ApiError, error_response

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LATE = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class BoundedProtocol(H11Protocol):
    """One HTTP connection that reports its state to a `ConnectionLimiter`.

    Args:
        connections: limiter of the server's connections.
        turns: limiter of the requests that start in one turn of the event loop.
        health_paths: paths that are served beyond the connection limits.
        retry_after: ``Retry-After`` of a 503, in seconds.
        options: arguments of uvicorn's protocol.
    """

    def __init__(
        self,
        connections: ConnectionLimiter,
        turns: LoopTurns,
        health_paths: frozenset[str],
        retry_after: int,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._open = connections
        self._turns = turns
        self._health_paths = health_paths
        self._retry_after = retry_after
        self._counted: _CountingTransport
        self._disconnect = Disconnect()
        self._resumed: Callable[[], object] = lambda: None
        self._half_closed: HalfClosedConnection | None = None
        self._inner = self.app
        self.app = self._run

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, which may register what to do if the client disconnects, and write its
        stream to the connection."""
        self._disconnect = Disconnect()
        self._disconnect.offer(scope)
        if self.cycle.disconnected:
            self._disconnect.lost()
        self._resumed = lambda: None
        if scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            offer_wire(scope, _ChunkedWire(self._counted, self.flow, self._call_on_resume))
        await self._turns.enter()
        await self._inner(scope, receive, send)

    def _call_on_resume(self, callback: Callable[[], object]) -> None:
        self._resumed = callback

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A client connected."""
        self._counted = _CountingTransport(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]
        admission = self._open.open(self, self.client[0] if self.client else None)
        if admission == "refused":
            transport.abort()
        elif admission == "health only":
            self._inner = _HealthOnly(self._inner, self._health_paths, self._retry_after)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""
        self._open.close(self)
        if self.cycle is not None and not self.cycle.response_complete:
            self._disconnect.lost()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The client sent its last byte. Return whether to keep the connection, until the response
        to a complete request is sent or the client turns out to have closed it.

        HTTP/1.0 has no interim responses to find that out: such a client counts as gone.
        """
        if (
            self.cycle is None
            or self.cycle.response_complete
            or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE)
            or self.cycle.scope["http_version"] != "1.1"
        ):
            return False
        if self._half_closed is None:
            self._half_closed = HalfClosedConnection(
                self._counted.transport, lambda: self._counted.written, self._probe
            )
        return True

    def _probe(self) -> None:
        """Write bytes that a client skips: an interim response (RFC 9110, 15.2.1), or what the
        response has for it."""
        if self.cycle.response_started:
            self._disconnect.probe()
        else:
            self._counted.write(_CONTINUE)

    def data_received(self, data: bytes) -> None:
        """The client sent bytes."""
        super().data_received(data)
        self._moved()

    def on_response_complete(self) -> None:
        """A response is complete; the next request may have arrived already."""
        super().on_response_complete()
        self._moved()
        if self._half_closed is not None and self.cycle.response_complete:
            self._counted.close()

    def resume_writing(self) -> None:
        """The client has read most of what was sent."""
        super().resume_writing()
        self._resumed()

    def shut(self) -> None:
        """Close the connection now and drop unsent bytes."""
        if self._counted.get_write_buffer_size():
            self._counted.abort()
        else:
            self._counted.close()

    def refuse_late_headers(self) -> None:
        """Answer 408 if part of a request has arrived, and close the connection."""
        if self.conn.trailing_data[0]:
            self._counted.write(_LATE)
        self.shut()

    def unsent(self) -> tuple[int, int]:
        """Number of buffered bytes, and of bytes sent so far."""
        waiting = self._counted.get_write_buffer_size()
        return waiting, self._counted.written - waiting

    def has_unread(self) -> bool:
        """Whether the socket holds bytes that the event loop has not read yet."""
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
    """A transport that counts the bytes written to another one."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        """Send or buffer bytes; drop them if the connection is closing."""
        if not self.transport.is_closing():
            self.written += len(data)
            self.transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class _ChunkedWire:
    """A `Wire` that writes chunks of the transfer coding "chunked" (RFC 9112, 7.1), which h11 gives
    to a response without a Content-Length. h11 keeps no state for each chunk.

    Args:
        transport: the connection's transport.
        flow: whether the transport's buffer is full.
        on_resume: sets what is called when it no longer is.
    """

    def __init__(
        self,
        transport: _CountingTransport,
        flow: FlowControl,
        on_resume: Callable[[Callable[[], object]], None],
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._on_resume = on_resume

    @property
    def is_paused(self) -> bool:
        """See `Wire`."""
        return self._flow.write_paused

    def on_resume(self, callback: Callable[[], object]) -> None:
        """See `Wire`."""
        self._on_resume(callback)

    def write(self, data: bytes) -> None:
        """See `Wire`."""
        if data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class _HealthOnly:
    """Answers one health check, and any other request with a 503."""

    def __init__(self, app: ASGIApp, health_paths: frozenset[str], retry_after: int) -> None:
        self._app = app
        self._health_paths = health_paths
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request with ``Connection: close``."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"connection", b"close")]
            await send(message)

        if scope["path"] in self._health_paths:
            await self._app(scope, receive, closing)
            return
        error = ApiError(503, "too many connections; try again later", code="overloaded")
        await error_response(error, self._retry_after)(scope, receive, closing)
