"""The events of a stream in the background, for readers that come and go."""

import asyncio
from collections.abc import Callable

from rjax.serve.http.event_stream import EventStream

_EVENTS_A_TURN = 128  # most events that a reader writes in one turn of the event loop


class EventLog:
    """Events in order; their sequence numbers count from 0. It is a `rjax.serve.http.wire.Wire`
    that is never paused.

    Args:
        on_write: called with the bytes of new events.

    Attributes:
        size: bytes of all events.
        events: the events so far, each with the blank line that ends it.
        has_ended: whether no more events come.
    """

    is_paused = False

    def __init__(self, on_write: Callable[[int], object]) -> None:
        self.size = 0
        self.events: list[bytes] = []
        self.has_ended = False
        self._on_write = on_write
        self._readers: set[Callable[[], object]] = set()

    def on_resume(self, callback: Callable[[], object]) -> None:
        """See `Wire`."""

    def write(self, data: bytes) -> None:
        """Add whole events."""
        ends = data.split(b"\n\n")
        self.events += [event + b"\n\n" for event in ends[:-1]]
        self.size += len(data)
        self._on_write(len(data))
        self._tell()

    def end(self) -> None:
        """Let readers end after the last event."""
        self.has_ended = True
        self._tell()

    def add_reader(self, changed: Callable[[], object]) -> None:
        """Call ``changed`` when events are added and when they end."""
        self._readers.add(changed)

    def remove_reader(self, changed: Callable[[], object]) -> None:
        """Undo `add_reader`, if it was called."""
        self._readers.discard(changed)

    def _tell(self) -> None:
        for changed in tuple(self._readers):
            changed()


class LoggedEvents(EventStream):
    """A response that sends the events of a log, including those to come.

    Args:
        log: the log of the events.
        start: number of the first event.
    """

    def __init__(self, log: EventLog, start: int) -> None:
        super().__init__()
        self._log = log
        self._next = start

    def begin(self) -> None:
        """See `EventStream`."""
        self.wire.on_resume(self._write)
        self._log.add_reader(self._write)
        self._write()

    def close(self) -> None:
        """See `EventStream`."""
        self._log.remove_reader(self._write)

    def _write(self) -> None:
        if self._ended.is_set():
            return
        for event in self._log.events[self._next : self._next + _EVENTS_A_TURN]:
            if self.wire.is_paused:
                return
            self.wire.write(event)
            self._next += 1
        if self._next < len(self._log.events):
            asyncio.get_running_loop().call_soon(self._write)
        elif self._log.has_ended:
            self.end()
