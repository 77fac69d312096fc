"""Named prefixes: beginnings that a client registers, pins and drops."""

import dataclasses
import time
from collections.abc import Mapping

from rjax.engine.llm_engine import LLMEngine
from rjax.serve.answers import PrefixCard, PrefixList
from rjax.serve.auth import Tenant
from rjax.serve.errors import ApiError
from rjax.serve.limits import ServeLimits
from rjax.serve.prompts import encode, message_tokens
from rjax.serve.requests import PrefixBody
from rjax.serve.sampling import check_word
from rjax.serve.service import Service
from rjax.serve.tenancy import cache_salt, engine_prefix_name


@dataclasses.dataclass(frozen=True, slots=True)
class NamedPrefix:
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


async def register(body: PrefixBody, tenant: Tenant, service: Service) -> PrefixCard:
    """Compute the KV of a beginning and keep it under a name of this tenant's; a name in use gets
    the new beginning."""
    limits = service.limits
    if not good_name(body.name, limits):
        raise ApiError(
            400,
            f"name: give 1 to {limits.name_chars} letters, digits, '.', '_' or '-', not only one "
            "or two dots",
            param="name",
        )
    check_word("cache_salt", body.cache_salt, limits)
    tokens = await _tokens(body, tenant, service)
    salt = cache_salt(tenant, body.cache_salt)
    found = NamedPrefix(body.name, tokens, salt, body.pin, int(time.time()))
    async with service.prefix_locks[tenant.name]:
        own = service.prefixes.setdefault(tenant.name, {})
        if body.name not in own and len(own) >= limits.prefixes:
            raise ApiError(
                409,
                f"there are {len(own)} prefixes already; drop one first",
                code="too_many_prefixes",
            )
        await _hold(found, tenant, service)
        own[body.name] = found
    return found.card()


def load(files: Mapping[str, str], engine: LLMEngine, service: Service) -> None:
    """Keep the prefixes of these files, by name, for every tenant, before the service's
    engine is started.

    Each tenant has its own copy, as of everything that is cached: see `rjax.serve.auth.Tenant`.

    Raises:
        InvalidConfigError: a file that this model and its settings cannot use.
        OutOfMemoryError: they are too many.
    """
    for name, path in files.items():
        for tenant in service.keys.tenants:
            key, salt = engine_prefix_name(tenant, name), cache_salt(tenant, None)
            held = engine.load_prefix(path, key, cache_salt=salt)
            own = service.prefixes.setdefault(tenant.name, {})
            own[name] = NamedPrefix(name, list(held.token_ids), salt, True, service.created)


def good_name(name: str, limits: ServeLimits) -> bool:
    """Whether a prefix may have this name."""
    plain = name.isascii() and all(c.isalnum() or c in "._-" for c in name)
    # Clients resolve "." and ".." in a path, so that no request would ever name these.
    return plain and 1 <= len(name) <= limits.name_chars and name not in (".", "..")


def listing(tenant: Tenant, service: Service) -> PrefixList:
    """The tenant's prefixes."""
    return PrefixList(data=[p.card() for p in service.prefixes.get(tenant.name, {}).values()])


def find(name: str, tenant: Tenant, service: Service) -> NamedPrefix:
    """One of the tenant's prefixes.

    Raises:
        ApiError: 404.
    """
    found = service.prefixes.get(tenant.name, {}).get(name)
    if found is None:
        raise ApiError(
            404, f"there is no prefix {name[:100]!r}; register it first", code="prefix_not_found"
        )
    return found


async def pin(name: str, pinned: bool, tenant: Tenant, service: Service) -> PrefixCard:
    """Pin a prefix or let go of its memory; its name stays."""
    async with service.prefix_locks[tenant.name]:
        known = find(name, tenant, service)
        if known.pinned != pinned:
            known = dataclasses.replace(known, pinned=pinned)
            await _hold(known, tenant, service)
            service.prefixes[tenant.name][name] = known
    return known.card()


async def drop(name: str, tenant: Tenant, service: Service) -> PrefixCard:
    """Forget a prefix."""
    async with service.prefix_locks[tenant.name]:
        known = find(name, tenant, service)
        del service.prefixes[tenant.name][name]
        if known.pinned:
            key = engine_prefix_name(tenant, name)
            await service.engine.call(lambda engine: engine.drop_prefix(key))
    return known.card()


async def _hold(prefix: NamedPrefix, tenant: Tenant, service: Service) -> None:
    """Have the engine compute the prefix, and keep it or not."""
    key = engine_prefix_name(tenant, prefix.name)
    tokens, salt, pinned = prefix.token_ids, prefix.salt, prefix.pinned

    def command(engine) -> None:
        engine.add_prefix(key, tokens, cache_salt=salt)
        if not pinned:
            engine.drop_prefix(key)

    await service.engine.call(command)


async def _tokens(body: PrefixBody, tenant: Tenant, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", param="prompt")
    if body.messages is not None:
        options = {"add_generation_prompt": False}
        return await message_tokens(body.messages, [], options, tenant, service)
    assert body.prompt is not None
    if not body.prompt:
        raise ApiError(400, "prompt is empty; give at least one token", param="prompt")
    if isinstance(body.prompt, list):
        return body.prompt
    return (await encode([body.prompt], tenant, service, "prompt"))[0]
