"""The events of a stream in the background, for readers that come and go."""

import asyncio
from collections.abc import AsyncIterator

from rjax.serve.http.event_stream import NamedEvent


class EventLog:
    """Events in order; their sequence numbers count from 0.

    Attributes:
        size: bytes of all events.
    """

    def __init__(self) -> None:
        self.size = 0
        self._events: list[NamedEvent] = []
        self._ended = False
        self._changed = asyncio.Event()

    def append(self, event: NamedEvent) -> int:
        """Add an event; returns its bytes."""
        self._events.append(event)
        size = len(event.name) + len(event.data)
        self.size += size
        self._wake()
        return size

    def end(self) -> None:
        """Let readers end after the last event."""
        self._ended = True
        self._wake()

    async def read(self, start: int) -> AsyncIterator[NamedEvent]:
        """The events from number ``start``, those to come included."""
        while True:
            changed = self._changed
            for event in self._events[start:]:
                start += 1
                yield event
            if changed is self._changed:
                if self._ended:
                    return
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
