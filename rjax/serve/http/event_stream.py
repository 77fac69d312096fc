"""Responses of server-sent events."""

import abc
import asyncio

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rjax.serve.http.disconnect import on_disconnect, set_probe, wait_for_disconnect
from rjax.serve.http.wire import SendWire, Wire, offered_wire

_COMMENT = b":\n\n"


class EventStream(Response, abc.ABC):
    """A response of server-sent events.

    Subclasses write events to ``self.wire`` from `begin` on and then call `end`.
    """

    media_type = "text/event-stream"

    def __init__(self) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["Content-Length"]
        self.wire: Wire
        self._ended = asyncio.Event()
        self._is_lost = False
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and stop when the client disconnects."""
        on_disconnect(scope, self._lost)
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            wire = offered_wire(scope)
            if wire is None:
                await self._send_messages(receive, send)
            else:
                set_probe(scope, self._write_comment)
                await self.write_to(wire)
        finally:
            self.close()
        if not self._is_lost:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def write_to(self, wire: Wire) -> None:
        """Write the events to a wire, up to the last one.

        Raises:
            Exception: the events failed, and the client must not take them for a whole stream.
        """
        self.wire = wire
        self.begin()
        await self._ended.wait()
        if self._failure is not None:
            raise self._failure

    async def _send_messages(self, receive: Receive, send: Send) -> None:
        """Send the events as ASGI messages."""
        wire = SendWire(send)
        sending = asyncio.ensure_future(wire.send_all())
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        for task in (sending, gone):
            task.add_done_callback(lambda task: None if task.cancelled() else self._lost())
        try:
            await self.write_to(wire)
            wire.end()
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            self._is_lost = gone.done() or sending.exception() is not None
        finally:
            for task in (sending, gone):
                task.cancel()
            found = await asyncio.gather(sending, gone, return_exceptions=True)
        if isinstance(found[0], Exception) and not isinstance(found[0], OSError):
            raise found[0]

    @abc.abstractmethod
    def begin(self) -> None:
        """The response has started: write the events so far, and register for more."""

    def end(self) -> None:
        """Everything is written."""
        self._ended.set()

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the source of the events, at the end or when the client disconnects, even if `begin`
        was never called; maybe more than once."""

    def _write_comment(self) -> None:
        """Write an event without fields, which clients skip."""
        if not self._ended.is_set():
            self.wire.write(_COMMENT)

    def _lost(self) -> None:
        self._is_lost = True
        self.close()
        self.end()
