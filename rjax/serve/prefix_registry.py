"""The named prefixes that clients registered, by tenant and name."""

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from weakref import WeakValueDictionary

from rjax.serve.auth import Tenant
from rjax.serve.errors import ApiError
from rjax.serve.responses import PrefixCard


@dataclasses.dataclass(frozen=True, slots=True)
class RegisteredPrefix:
    """One registered prefix.

    Attributes:
        name: the client's.
        token_ids: of the prefix.
        salt: of the prefix cache that holds it.
        pinned: whether its KV stays; otherwise it is kept only while nothing else needs the memory.
        created: seconds since 1970.
    """

    name: str
    token_ids: list[int]
    salt: str | None
    pinned: bool
    created: int

    def card(self) -> PrefixCard:
        """What a client is told."""
        return PrefixCard(
            name=self.name,
            num_tokens=len(self.token_ids),
            pinned=self.pinned,
            created=self.created,
        )


class PrefixRegistry:
    """Keeps each tenant's prefixes under their names; belongs to the event loop.

    It knows nothing of the engine: `rjax.serve.prefixes` keeps the two in step.
    """

    def __init__(self) -> None:
        self._named: defaultdict[str, dict[str, RegisteredPrefix]] = defaultdict(dict)
        self._pending: defaultdict[str, set[str]] = defaultdict(set)
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def all(self, tenant: Tenant) -> list[RegisteredPrefix]:
        """The tenant's prefixes, in the order in which their names were registered."""
        return list(self._named[tenant.name].values())

    def get(self, tenant: Tenant, name: str) -> RegisteredPrefix | None:
        """The tenant's prefix of this name."""
        return self._named[tenant.name].get(name)

    def put(self, tenant: Tenant, prefix: RegisteredPrefix) -> None:
        """Give a prefix its name, in place of what the name meant before."""
        self._named[tenant.name][prefix.name] = prefix

    def remove(self, tenant: Tenant, name: str) -> None:
        """Forget a name that is registered."""
        del self._named[tenant.name][name]

    def lock(self, tenant: Tenant, name: str) -> asyncio.Lock:
        """Held while the meaning of a name changes, so that changes come one after the other."""
        return self._locks.setdefault((tenant.name, name), asyncio.Lock())

    @contextlib.contextmanager
    def pending(self, tenant: Tenant, name: str, limit: int) -> Iterator[None]:
        """Count a name while its prefix is being computed.

        Raises:
            ApiError: 409, the name is new and the tenant has ``limit`` names already.
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
