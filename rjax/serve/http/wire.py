"""The interface to which a response writes the bytes of its stream.

An ASGI message passes every middleware and h11, for each chunk of a stream.
`rjax.serve.http.http_protocol` therefore offers a `Wire` of the connection in
the scope of each request. HTTP/1.0 and other ASGI servers get messages.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from starlette.types import Scope, Send

_EXTENSION = "rjax.wire"
_LINE_ENDS = [(c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\u0085\u2028\u2029"]
_HIGH_WATER = 64 * 2**10  # unsent bytes of a `SendWire` above which it is paused


@runtime_checkable
class Wire(Protocol):
    """Writes the body of a response whose start was sent and whose end will be, as messages."""

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly; what is written then is buffered."""
        ...

    def on_resume(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever the wire is no longer paused."""
        ...

    def write(self, data: bytes) -> None:
        """Send or buffer bytes; does nothing once the connection is lost."""
        ...


def event_bytes(text: str) -> bytes:
    """Server-sent events whose data is JSON, as bytes.

    U+0085, U+2028 and U+2029 are escaped as JSON does: they end no line of an event, but many
    clients split events by what their language calls a line (Python's ``splitlines``, say).
    """
    data = text.encode()
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for character, escape in _LINE_ENDS:
            data = data.replace(character, escape)
    return data


def offer_wire(scope: Scope, wire: Wire) -> None:
    """Let the response to this request write to a wire."""
    scope.setdefault("extensions", {})[_EXTENSION] = wire


def offered_wire(scope: Scope) -> Wire | None:
    """The wire of this request's connection; None if its server has none."""
    return scope.get("extensions", {}).get(_EXTENSION)


class SendWire:
    """A wire that sends ASGI messages, in a task that runs `send_all`.

    Args:
        send: the request's ASGI ``send``.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._unsent: list[bytes] = []
        self._size = 0
        self._resume: Callable[[], object] = lambda: None
        self._changed = asyncio.Event()
        self._is_ended = False

    @property
    def is_paused(self) -> bool:
        """See `Wire`."""
        return self._size > _HIGH_WATER

    def on_resume(self, callback: Callable[[], object]) -> None:
        """See `Wire`."""
        self._resume = callback

    def write(self, data: bytes) -> None:
        """See `Wire`."""
        self._unsent.append(data)
        self._size += len(data)
        self._changed.set()

    def end(self) -> None:
        """Let `send_all` return after the bytes so far."""
        self._is_ended = True
        self._changed.set()

    async def send_all(self) -> None:
        """Send what is written until `end`."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._unsent:
                body, self._unsent = b"".join(self._unsent), []
                was_paused, self._size = self.is_paused, 0
                if was_paused:
                    self._resume()
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            if self._is_ended:
                return
