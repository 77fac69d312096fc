"""Tell a client that has shut down its write side from one that has closed the connection.

Both send the same FIN after the request. The kernel of a client that has closed the connection
answers later bytes with a reset; a client that only shut down its write side (SHUT_WR) reads them.
The server therefore sends bytes that clients skip, and ends the request when a reset comes.
"""

import asyncio
import select
from collections.abc import Callable

_LOOK_SECONDS = 0.01  # until the first look for a reset, and the first after a probe
_MAX_LOOK_SECONDS = 0.25
_PROBE_SECONDS = 0.05  # until the first probe; most answers are there before


class HalfClosedConnection:
    """Watches a connection whose client has sent a FIN; aborts it if the client has closed it.

    Each interval between two probes is twice as long as the one before: a proxy may pass on a FIN
    at once and a reset only after several writes. The bytes of the response are as good as a probe.

    Args:
        transport: the connection's transport.
        num_written: number of bytes written to it so far.
        probe: writes bytes that the client skips, or nothing if the response allows none now.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        num_written: Callable[[], int],
        probe: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._num_written = num_written
        self._probe = probe
        self._seen = num_written()
        self._look_after = _LOOK_SECONDS
        self._probe_after = _PROBE_SECONDS
        self._probe_at = self._loop.time() + _PROBE_SECONDS
        self._look()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _is_reset(self._transport):
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at:
            if self._num_written() == self._seen and not self._transport.get_write_buffer_size():
                self._probe()
                self._look_after = _LOOK_SECONDS
            self._seen = self._num_written()
            self._probe_after *= 2
            self._probe_at = self._loop.time() + self._probe_after
        self._loop.call_later(self._look_after, self._look)
        self._look_after = min(2 * self._look_after, _MAX_LOOK_SECONDS)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether both directions of a socket are closed, which the event loop does not notice without
    a write after a FIN."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
