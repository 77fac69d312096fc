"""Bounds on open connections: how many, from whom, and how long each may be silent or stuck."""

import ipaddress
import itertools
import time
from collections import OrderedDict
from typing import Any, Literal, Protocol, runtime_checkable

from rjax.serve.limits import ServeLimits

type Admission = Literal["served", "health only", "refused"]
type State = Literal["silent", "idle", "busy"]

_LEAST_PROGRESS = 16 * 2**10  # bytes that a client takes within ``send_seconds``
_REMEMBERED = 4096  # addresses that had an answer
_LOOKED_AT = 64  # connections that may be silent, for each that wants their place


@runtime_checkable
class Connection(Protocol):
    """What the bounds need of a connection."""

    def shut(self) -> None:
        """Close it now."""
        ...

    def refuse_late_headers(self) -> None:
        """Say that the headers did not come in time, and close it."""
        ...

    def unsent(self) -> tuple[int, int]:
        """Bytes that wait for the client, and bytes that went out in all."""
        ...

    def has_unread(self) -> bool:
        """Whether bytes of the client have come that the event loop has not read yet."""
        ...


class ConnectionLimiter:
    """All open connections of a server.

    Where an address, or all of them together, have as many as they may, a new connection takes the
    place of a silent one, then of one that is idle between two requests: the oldest of the address,
    or where it concerns all addresses of the one that has most silent ones beyond those it uses,
    and first of addresses that had no answer lately. Only where all are busy is the new one
    refused, except for a few on which /health is answered. A client that sends its request at once
    is therefore served however many others are silent, and however many of them connect in one
    turn of the event loop.

    A *silent* connection has no complete request yet; its headers have ``header_seconds``. The
    client of a connection with unsent bytes has ``send_seconds`` to take some of them.

    All methods belong to one event loop.

    Args:
        limits: ``address_connections``, ``health_connections``, ``header_seconds``,
            ``send_seconds``.
        most_open: connections of all addresses.
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
        """Count a new connection from this address; it is silent at first."""
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
        """A connection is gone. Closing twice does nothing."""
        record = self._records.pop(connection, None)
        if record is None:
            return
        record.leave(connection)
        if record.address in self._addresses and not len(self._addresses[record.address]):
            del self._addresses[record.address]

    def now(self, connection: Connection, state: State) -> None:
        """Say what a connection does; one that stays silent keeps its deadline."""
        record = self._records.get(connection)
        if record is not None and record.state != state:
            if record.state == "busy":
                self._note_answer(record.address)
            record.leave(connection)
            record.enter(state, connection)

    def sweep(self) -> None:
        """Close the connections whose time is up."""
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
                for oldest in itertools.islice(one.members[state], _LOOKED_AT):
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
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)


class _Group:
    """Connections that are counted together; those of each state in the order of entering it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.members: dict[State, dict[Connection, None]] = {"silent": {}, "idle": {}, "busy": {}}

    def __len__(self) -> int:
        return sum(map(len, self.members.values()))

    def oldest(self, state: State) -> Connection | None:
        """The connection that has been in this state for longest."""
        return next(iter(self.members[state]), None)

    def unused(self) -> int:
        """How many more are silent than are in use."""
        return 2 * len(self.members["silent"]) - len(self)


class _Record:
    """What is known of one connection."""

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
        """When the client last took enough; ``now`` where nothing waits for it."""
        waiting, sent = connection.unsent()
        if not waiting or sent >= self._mark[0] + _LEAST_PROGRESS or not self._mark[1]:
            self._mark = sent, now
        return self._mark[1]


def _network(address: str | None) -> str:
    """What counts as one address: of IPv6 a whole /64, since a host may use all of it."""
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
