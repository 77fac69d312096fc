"""Responses that clients may come back to, kept in memory within bounds."""

import dataclasses
from collections import OrderedDict, defaultdict

from rjax.serve.errors import ApiError
from rjax.serve.responses_api.input_items import InputItem


@dataclasses.dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that ended.

    Attributes:
        id: its name.
        response: its JSON.
        conversation: JSON of the chat messages that led to it, its own last; without instructions.
        items: of its request's input.
    """

    id: str
    response: bytes
    conversation: bytes
    items: tuple[InputItem, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that count against the bound."""
        items = sum(len(item.id) + len(item.data) for item in self.items)
        return len(self.response) + len(self.conversation) + items


class ResponseStore:
    """The stored responses of each tenant; the oldest make room for new ones.

    One tenant's responses are unknown to another, and do not push out another's.

    Args:
        most: responses of one tenant.
        most_bytes: of one tenant's responses.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._tenants: defaultdict[str, _Kept] = defaultdict(_Kept)

    def has_room(self, size: int) -> bool:
        """Whether a response of so many bytes is kept at all."""
        return size <= self._most_bytes

    def add(self, tenant: str, found: StoredResponse) -> None:
        """Keep a response for which there is room."""
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
        """Forget a response.

        Raises:
            ApiError: 404.
        """
        kept = self._tenants[tenant]
        kept.size -= self.find(tenant, name).size
        del kept.by_id[name]


@dataclasses.dataclass
class _Kept:
    """What one tenant has, oldest first."""

    by_id: OrderedDict[str, StoredResponse] = dataclasses.field(default_factory=OrderedDict)
    size: int = 0
