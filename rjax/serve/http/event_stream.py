"""Responses of server-sent events."""

import abc
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rjax.serve.http.disconnect import on_disconnect, set_probe, wait_for_disconnect
from rjax.serve.http.wire import SendWire, Wire, event_bytes, offered_wire

_COMMENT = b":\n\n"


class NamedEvent(NamedTuple):
    """A server-sent event with a name."""

    name: str
    data: str


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
                self.wire = wire
                set_probe(scope, self._write_comment)
                self.begin()
                await self._ended.wait()
        finally:
            self.close()
        if self._failure is not None:
            raise self._failure
        if not self._is_lost:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_messages(self, receive: Receive, send: Send) -> None:
        """Send the events as ASGI messages."""
        self.wire = wire = SendWire(send)
        sending = asyncio.ensure_future(wire.send_all())
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        for task in (sending, gone):
            task.add_done_callback(lambda task: None if task.cancelled() else self._lost())
        try:
            self.begin()
            await self._ended.wait()
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
        """The response has started: write what there is, and register for more."""

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


class IteratedEvents(EventStream):
    """The events of an iterator.

    Args:
        events: it must turn its errors into events, because the status line is sent before the
            first one.
        close: called at the end, on success, error or disconnect, even if ``events`` was never
            started; maybe more than once.
    """

    def __init__(self, events: AsyncIterator[NamedEvent], close: Callable[[], None]) -> None:
        super().__init__()
        self._events = events
        self._close = close
        self._writing: asyncio.Task[None] | None = None
        self._not_paused = asyncio.Event()

    def begin(self) -> None:
        """See `EventStream`."""
        self.wire.on_resume(self._not_paused.set)
        self._writing = asyncio.ensure_future(self._write())

    def close(self) -> None:
        """See `EventStream`."""
        if self._writing is not None:
            self._writing.cancel()
        self._close()

    async def _write(self) -> None:
        try:
            async for name, data in self._events:
                self.wire.write(event_bytes(f"event: {name}\ndata: {data}\n\n"))
                while self.wire.is_paused:
                    self._not_paused.clear()
                    await self._not_paused.wait()
        except Exception as error:
            self._failure = error  # the client must not take the stream for a whole one
        finally:
            self.end()
