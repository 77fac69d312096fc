"""Limits on open connections: their number, per address and in total, and timeouts."""

import ipaddress
import itertools
import time
from collections import OrderedDict
from typing import Any, Literal, Protocol, runtime_checkable

from rjax.serve.config.limits import ServeLimits

type Admission = Literal["served", "health only", "refused"]
type State = Literal["silent", "idle", "busy"]

_MIN_PROGRESS = 16 * 2**10  # bytes that a client must read within ``send_seconds``
_MAX_ANSWERED = 4096  # remembered addresses that got a response
_MAX_CANDIDATES = 64  # connections examined for eviction per new connection


@runtime_checkable
class Connection(Protocol):
    """The interface of a connection for `ConnectionLimiter`."""

    def shut(self) -> None:
        """Close it now."""
        ...

    def refuse_late_headers(self) -> None:
        """Answer that the headers did not arrive in time, and close it."""
        ...

    def unsent(self) -> tuple[int, int]:
        """Number of buffered bytes, and of bytes sent so far."""
        ...

    def has_unread(self) -> bool:
        """Whether the socket holds bytes that the event loop has not read yet."""
        ...


class ConnectionLimiter:
    """The open connections of a server.

    A *silent* connection has not sent a complete request yet, a *busy* one has a request in
    progress, an *idle* one is between two requests.

    If the limit of an address or of all addresses is reached, a new connection evicts a silent
    connection, or if there is none an idle one. At the limit of an address, the address's oldest
    one is evicted. At the total limit, the evicted one belongs to the address with the largest
    surplus of silent over used connections; addresses without a recent response come first. A new
    connection is refused only if all others are busy. A few connections beyond the limits get
    answers to health checks. A client that sends its request immediately is therefore served, even
    if many other clients connect and stay silent.

    Silent connections are closed after ``header_seconds``. Connections with unsent bytes are closed
    if the client does not read enough of them within ``send_seconds``.

    Call all methods from one event loop.

    Args:
        limits: ``address_connections``, ``health_connections``, ``header_seconds``,
            ``send_seconds``.
        most_open: maximum of connections of all addresses.
    """

    def __init__(self, limits: ServeLimits, most_open: int) -> None:
        self._limits = limits
        self._all = _Group(most_open)
        self._health = _Group(limits.health_connections)
        self._addresses: dict[str, _Group] = {}
        self._answered: OrderedDict[str, None] = OrderedDict()  # addresses, the latest last
        self._records: dict[Connection, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def open(self, connection: Connection, address: str | None) -> Admission:
        """Register a new connection of an address, in state silent."""
        address = _network(address)
        own = self._addresses.get(address)
        if own is None:
            own = _Group(self._limits.address_connections)
        if self._make_room(own) and self._make_room(self._all):
            self._addresses[address] = own
            groups, admission = (own, self._all), "served"
        elif self._make_room(self._health):
            groups, admission = (self._health,), "health only"
        else:
            return "refused"
        record = self._records[connection] = _Record(address, groups)
        record.enter("silent", connection)
        return admission

    def close(self, connection: Connection) -> None:
        """Unregister a connection. Closing twice does nothing."""
        record = self._records.pop(connection, None)
        if record is None:
            return
        record.leave(connection)
        if record.address in self._addresses and not len(self._addresses[record.address]):
            del self._addresses[record.address]

    def now(self, connection: Connection, state: State) -> None:
        """Set the state of a connection. Setting the same state does not extend a deadline."""
        record = self._records.get(connection)
        if record is not None and record.state != state:
            if record.state == "busy":
                self._note_answer(record.address)
            record.leave(connection)
            record.enter(state, connection)

    def sweep(self) -> None:
        """Close the connections that exceeded a timeout."""
        now = time.monotonic()
        late = now - self._limits.header_seconds
        for group in (self._all, self._health):
            oldest = group.oldest("silent")
            while oldest is not None and self._records[oldest].since <= late:
                oldest.refuse_late_headers()
                self.close(oldest)
                oldest = group.oldest("silent")
        stuck = now - self._limits.send_seconds
        for connection, record in list(self._records.items()):
            if record.stuck_since(connection, now) <= stuck:
                connection.shut()

    def _make_room(self, group: "_Group") -> bool:
        if len(group) < group.most:
            return True
        states: tuple[State, ...] = ("silent", "idle")
        for state in states:
            groups = [group]
            if group is self._all and group.members[state]:
                groups.insert(0, self._least_deserving())
            for one in groups:
                for oldest in itertools.islice(one.members[state], _MAX_CANDIDATES):
                    if not oldest.has_unread():
                        oldest.shut()
                        self.close(oldest)
                        return True
        return False

    def _least_deserving(self) -> "_Group":
        def rank(item: tuple[str, _Group]) -> tuple[bool, int]:
            address, own = item
            return len(own.members["silent"]) > 0 and address not in self._answered, own.unused()

        return max(self._addresses.items(), key=rank)[1]

    def _note_answer(self, address: str) -> None:
        self._answered[address] = None
        self._answered.move_to_end(address)
        if len(self._answered) > _MAX_ANSWERED:
            self._answered.popitem(last=False)


class _Group:
    """Connections with a common limit, listed by state in the order of entering it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.members: dict[State, dict[Connection, None]] = {"silent": {}, "idle": {}, "busy": {}}

    def __len__(self) -> int:
        return sum(map(len, self.members.values()))

    def oldest(self, state: State) -> Connection | None:
        """The connection that has been in this state the longest."""
        return next(iter(self.members[state]), None)

    def unused(self) -> int:
        """Number of silent connections minus the number of others."""
        return 2 * len(self.members["silent"]) - len(self)


class _Record:
    """State of one connection."""

    def __init__(self, address: str, groups: tuple[_Group, ...]) -> None:
        self.address = address
        self.state: State = "silent"
        self.since = 0.0
        self._groups = groups
        self._mark = (0, 0.0)  # bytes sent, and when they were counted

    def enter(self, state: State, connection: Connection) -> None:
        self.state, self.since = state, time.monotonic()
        for group in self._groups:
            group.members[state][connection] = None

    def leave(self, connection: Connection) -> None:
        for group in self._groups:
            group.members[self.state].pop(connection, None)

    def stuck_since(self, connection: Connection, now: float) -> float:
        """Time since which the client has not read enough; ``now`` if nothing is buffered."""
        waiting, sent = connection.unsent()
        if not waiting or sent >= self._mark[0] + _MIN_PROGRESS or not self._mark[1]:
            self._mark = sent, now
        return self._mark[1]


def _network(address: str | None) -> str:
    """The key by which an address is counted; for IPv6 its /64 network, which one host may own."""
    if address is None:
        return ""
    try:
        found: Any = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), 64), strict=False))
