"""In-memory store of responses, with limits per tenant."""

import dataclasses
from collections import OrderedDict, defaultdict

from rjax.serve.errors import ApiError
from rjax.serve.responses_api.input_items import InputItem


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A completed response.

    Attributes:
        id: of the response.
        response: its JSON.
        conversation: JSON of the chat messages up to and including the response, without
            instructions.
        items: of the request's input.
    """

    id: str
    response: bytes
    conversation: bytes
    items: tuple[InputItem, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that count against ``responses_bytes``."""
        items = sum(len(item.id) + len(item.data) for item in self.items)
        return len(self.response) + len(self.conversation) + items


class ResponseStore:
    """The stored responses of each tenant; the oldest are evicted for new ones.

    Tenants cannot access or evict each other's responses.

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
        """Store a response of at most ``most_bytes`` bytes."""
        assert self.has_room(found.size)
        kept = self._tenants[tenant]
        kept.by_id[found.id] = found
        kept.size += found.size
        while len(kept.by_id) > self._most or kept.size > self._most_bytes:
            _, oldest = kept.by_id.popitem(last=False)
            kept.size -= oldest.size

    def find(self, tenant: str, name: str, param: str | None = None) -> StoredResponse:
        """A stored response of the tenant's.

        Raises:
            ApiError: 404.
        """
        found = self._tenants[tenant].by_id.get(name)
        if found is None:
            raise ApiError(
                404,
                f"no response {name[:100]!r} is stored here: it was never stored (store false, or "
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
        kept = self._tenants[tenant]
        kept.size -= self.find(tenant, name).size
        del kept.by_id[name]


@dataclasses.dataclass
class _Kept:
    """One tenant's responses, oldest first."""

    by_id: OrderedDict[str, StoredResponse] = dataclasses.field(default_factory=OrderedDict)
    size: int = 0
