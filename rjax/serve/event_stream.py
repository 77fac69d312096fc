"""Server-sent events that stop when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rjax.serve.disconnect import on_disconnect, wait_for_disconnect


class NamedEvent(NamedTuple):
    """A server-sent event with a name."""

    name: str
    data: str


class EventStream(StreamingResponse):
    """A response of server-sent events; it closes their source when the client disconnects.

    Args:
        events: data of each event, or its name and data. The iterator must turn its errors into
            events, because the status line is sent before the first one.
        close: called at the end, on success, error or disconnect, even if ``events`` was never
            started; maybe more than once.
    """

    def __init__(
        self, events: AsyncIterator[str] | AsyncIterator[NamedEvent], close: Callable[[], None]
    ) -> None:
        super().__init__(
            (),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        on_disconnect(scope, self._close)
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            found = await asyncio.gather(sending, gone, return_exceptions=True)
            self._close()
        if isinstance(found[0], Exception) and not isinstance(found[0], OSError):
            raise found[0]

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            named = isinstance(event, NamedEvent)
            text = f"event: {event.name}\ndata: {event.data}" if named else f"data: {event}"
            body = f"{text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
