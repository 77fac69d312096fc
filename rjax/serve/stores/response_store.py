"""In-memory store of responses, with limits per tenant."""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable

from rjax.serve.protocol.errors import ApiError
from rjax.serve.stores.event_log import EventLog
from rjax.serve.stores.input_items import InputItem


@dataclasses.dataclass(frozen=True, slots=True)
class RunningResponse:
    """The callbacks that end the generation of a response in the background.

    Attributes:
        abort: ends it; nothing more is stored.
        cancel: ends it and stores the response as cancelled, unless it has just ended.
    """

    abort: Callable[[], object]
    cancel: Callable[[], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended, or one in the background.

    Attributes:
        id: the response's id.
        response: its JSON.
        conversation: JSON of the chat messages up to and including the response, without
            instructions; empty if no response can continue it.
        items: items of the request's input.
        background: whether it was made in the background.
        running: callbacks that end its generation; None if it has ended.
        events: log of the events of a stream in the background.
    """

    id: str
    response: bytes
    conversation: bytes
    items: tuple[InputItem, ...] = ()
    background: bool = False
    running: RunningResponse | None = None
    events: EventLog | None = None

    @property
    def size(self) -> int:
        """Bytes that count against ``responses_bytes``."""
        items = sum(len(item.id) + len(item.data) for item in self.items)
        events = 0 if self.events is None else self.events.size
        return len(self.response) + len(self.conversation) + items + events


class ResponseStore:
    """The stored responses of each tenant; the oldest are evicted for new ones.

    Tenants cannot access or evict each other's responses. A response in the background that is
    evicted or deleted is aborted.

    Args:
        most: maximum of responses of one tenant.
        most_bytes: maximum of bytes of one tenant's responses.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: defaultdict[str, _Kept] = defaultdict(_Kept)

    def has_room(self, size: int) -> bool:
        """Whether a response of this size can be stored."""
        return size <= self._most_bytes

    def add(self, tenant: str, found: StoredResponse) -> None:
        """Store a new response of at most ``most_bytes`` bytes."""
        assert self.has_room(found.size)
        kept = self._tenants[tenant]
        kept.by_id[found.id] = found
        kept.size += found.size
        self._evict(kept)

    def replace(self, tenant: str, found: StoredResponse) -> None:
        """Store a newer state of a response, unless it was evicted or deleted."""
        kept = self._tenants[tenant]
        before = kept.by_id.get(found.id)
        if before is not None:
            kept.by_id[found.id] = found
            kept.size += found.size - before.size
            self._evict(kept)

    def count_events(self, tenant: str, name: str, size: int) -> None:
        """Count ``size`` bytes that were added to the events of a response."""
        kept = self._tenants[tenant]
        if name in kept.by_id:
            kept.size += size
            self._evict(kept)

    def find(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """A stored response of the tenant's.

        Raises:
            ApiError: 404.
        """
        found = self._tenants[tenant].by_id.get(name)
        if found is None:
            raise ApiError(
                404,
                f"Response with id {name[:100]!r} not found: it was never stored (store false, or "
                "it failed), was deleted, made room for newer ones, or was lost with a restart; "
                "send the whole conversation as input",
                code="response_not_found",
                param=param,
            )
        return found

    def drop(self, tenant: str, name: str) -> None:
        """Delete a response.

        Raises:
            ApiError: 404.
        """
        self.find(tenant, name)
        self._tenants[tenant].drop(name)

    def _evict(self, kept: "_Kept") -> None:
        while len(kept.by_id) > self._most or kept.size > self._most_bytes:
            kept.drop(next(iter(kept.by_id)))


@dataclasses.dataclass
class _Kept:
    """One tenant's responses, oldest first."""

    by_id: OrderedDict[str, StoredResponse] = dataclasses.field(default_factory=OrderedDict)
    size: int = 0

    def drop(self, name: str) -> None:
        found = self.by_id.pop(name)
        self.size -= found.size
        if found.running is not None:
            found.running.abort()
