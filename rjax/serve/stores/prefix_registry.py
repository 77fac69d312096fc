"""The named prefixes that clients registered, by tenant and name."""

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from weakref import WeakValueDictionary

from rjax.serve.http.auth import Tenant
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.responses import PrefixCard


@dataclasses.dataclass(frozen=True, slots=True)
class RegisteredPrefix:
    """One registered prefix.

    Attributes:
        name: chosen by the client.
        token_ids: the prefix's token ids.
        salt: cache salt of its pages.
        pinned: whether its KV is pinned; otherwise it may be evicted.
        created: seconds since 1970.
    """

    name: str
    token_ids: list[int]
    salt: str | None
    pinned: bool
    created: int

    def card(self) -> PrefixCard:
        """The prefix as an API object."""
        return PrefixCard(
            name=self.name,
            num_tokens=len(self.token_ids),
            pinned=self.pinned,
            created=self.created,
        )


class PrefixRegistry:
    """Each tenant's prefixes by name; use it from the event loop only.

    `rjax.serve.api.prefixes` keeps the registry and the engine consistent.
    """

    def __init__(self) -> None:
        self._named: defaultdict[str, dict[str, RegisteredPrefix]] = defaultdict(dict)
        self._pending: defaultdict[str, set[str]] = defaultdict(set)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def all(self, tenant: Tenant) -> list[RegisteredPrefix]:
        """The tenant's prefixes, in the order of registration."""
        return list(self._named[tenant.name].values())

    def get(self, tenant: Tenant, name: str) -> RegisteredPrefix | None:
        """The tenant's prefix of this name, if there is one."""
        return self._named[tenant.name].get(name)

    def put(self, tenant: Tenant, prefix: RegisteredPrefix) -> None:
        """Register a prefix and replace the one that had its name."""
        self._named[tenant.name][prefix.name] = prefix

    def remove(self, tenant: Tenant, name: str) -> None:
        """Remove a registered name."""
        del self._named[tenant.name][name]

    def lock(self, tenant: Tenant, name: str) -> asyncio.Lock:
        """A lock that serialises changes of one name."""
        return self._locks.setdefault((tenant.name, name), asyncio.Lock())

    @contextlib.contextmanager
    def pending(self, tenant: Tenant, name: str, limit: int) -> Iterator[None]:
        """Count a name against the limit while its prefix is computed.

        Raises:
            ApiError: 409, the name is new and the tenant already has ``limit`` names.
        """
        known, pending = self._named[tenant.name], self._pending[tenant.name]
        if name not in known and len(known.keys() | pending) >= limit:
            raise ApiError(
                409,
                f"there are {limit} prefixes already; drop one first",
                code="too_many_prefixes",
            )
        pending.add(name)
        try:
            yield
        finally:
            pending.discard(name)
