"""Handlers of /v1/prefixes: clients register, pin and drop named prefixes."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping

from rjax.engine.protocol import KeepAs
from rjax.errors import InvalidConfigError, OutOfMemoryError, OverloadedError
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.serve.api.prompts import encode, message_tokens
from rjax.serve.api.sampling import check_salt
from rjax.serve.api.service import Service
from rjax.serve.api.tenancy import cache_salt, common_options, engine_prefix_name
from rjax.serve.config.prefix_names import is_valid_name
from rjax.serve.http.auth import Tenant
from rjax.serve.protocol.errors import ApiError
from rjax.serve.protocol.requests import PrefixRequest
from rjax.serve.protocol.responses import PrefixCard, PrefixList
from rjax.serve.stores.prefix_registry import RegisteredPrefix

# A request must generate a token; it is discarded.
_ONE_TOKEN = SamplingParams(
    temperature=0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
)


async def register(body: PrefixRequest, tenant: Tenant, service: Service) -> PrefixCard:
    """Compute the KV of a prefix and register it under a name of this tenant, replacing a prefix of
    the same name."""
    limits = service.limits
    if not is_valid_name(body.name, limits):
        raise ApiError(
            400,
            f"name: give 1 to {limits.name_chars} letters, digits, '.', '_' or '-', not only one "
            "or two dots",
            param="name",
        )
    check_salt(body.cache_salt, limits)
    tokens = await _tokens(body, tenant, service)
    service.check_prompts([len(tokens)], "prompt")
    salt = cache_salt(tenant, body.cache_salt)
    found = RegisteredPrefix(body.name, tokens, salt, body.pin, int(time.time()))
    async with service.prefixes.lock(tenant, body.name):
        with service.prefixes.pending(tenant, body.name, limits.prefixes):
            await _hold(found, tenant, service)
    return found.card()


def load(files: Mapping[str, str], service: Service) -> None:
    """Load prefix files for every tenant, before the service's engine starts.

    Each tenant gets its own copy, because tenants do not share the prefix cache; see
    `rjax.serve.http.auth.Tenant`.

    Args:
        files: paths by prefix name.
        service: the service whose registry gets the prefixes.

    Raises:
        InvalidConfigError: a file does not match this model and its settings.
        OutOfMemoryError: the KV pool is too small for all prefixes.
    """
    channel = service.engine.channel
    for name, path in files.items():
        for tenant in service.keys.tenants:
            key, salt = engine_prefix_name(tenant, name), cache_salt(tenant, None)
            held = channel.call_utility_sync("load_prefix", path, key, cache_salt=salt)
            tokens = list(held.token_ids)
            found = RegisteredPrefix(name, tokens, salt, True, service.created)
            service.prefixes.put(tenant, found)


def listing(tenant: Tenant, service: Service) -> PrefixList:
    """The tenant's prefixes."""
    return PrefixList(data=[p.card() for p in service.prefixes.all(tenant)])


def find(name: str, tenant: Tenant, service: Service) -> RegisteredPrefix:
    """The tenant's prefix of this name.

    Raises:
        ApiError: 404.
    """
    found = service.prefixes.get(tenant, name)
    if found is None:
        raise ApiError(
            404, f"there is no prefix {name[:100]!r}; register it first", code="prefix_not_found"
        )
    return found


async def pin(name: str, pinned: bool, tenant: Tenant, service: Service) -> PrefixCard:
    """Pin or unpin a prefix; it stays registered."""
    async with service.prefixes.lock(tenant, name):
        known = find(name, tenant, service)
        if known.pinned == pinned:
            return known.card()
        changed = dataclasses.replace(known, pinned=pinned)
        if pinned:
            await _hold(changed, tenant, service)
        else:
            service.prefixes.put(tenant, changed)
            await _unpin(name, tenant, service)
        return changed.card()


async def drop(name: str, tenant: Tenant, service: Service) -> PrefixCard:
    """Unpin and unregister a prefix."""
    async with service.prefixes.lock(tenant, name):
        known = find(name, tenant, service)
        service.prefixes.remove(tenant, name)
        if known.pinned:
            await _unpin(name, tenant, service)
    return known.card()


async def _hold(prefix: RegisteredPrefix, tenant: Tenant, service: Service) -> None:
    """Compute a prefix by an ordinary request and register it.

    Raises:
        ApiError, InvalidRequestError, OverloadedError, EngineDeadError: the registration did not
            change.
    """
    key = engine_prefix_name(tenant, prefix.name)
    replaced = service.prefixes.get(tenant, prefix.name)

    async def is_kept() -> bool:
        wanted = key, tuple(prefix.token_ids), prefix.salt
        kept = await service.engine.call_utility("prefixes")
        return wanted in [(p.name, p.token_ids, p.cache_salt) for p in kept]

    try:
        await _compute(prefix, key, tenant, service)
    except asyncio.CancelledError:
        # The engine may have pinned it before the request was aborted.
        if prefix.pinned and await is_kept():
            service.prefixes.put(tenant, prefix)
        raise
    service.prefixes.put(tenant, prefix)
    if not prefix.pinned and replaced is not None and replaced.pinned:
        await _unpin(prefix.name, tenant, service)


async def _compute(prefix: RegisteredPrefix, key: str, tenant: Tenant, service: Service) -> None:
    """Compute a prefix in the engine and pin it under this key if it is ``pinned``."""
    options = common_options(tenant, prefix.salt, service.config)
    if prefix.pinned:
        options["keep_as"] = KeepAs(key)
    try:
        async with await service.engine.submit(
            prefix.token_ids, _ONE_TOKEN, tenant=tenant.name, **options
        ) as stream:
            output = await anext(stream)
        if output.error is not None:
            raise output.error
    except OverloadedError as error:
        service.metrics.rejected(error.reason)
        raise
    except OutOfMemoryError as error:  # its message would reveal other tenants' memory use
        raise ApiError(
            409,
            f"there is no room to keep {len(prefix.token_ids)} more tokens; drop a prefix, or "
            "register it with pin false",
            code="out_of_memory",
        ) from error
    except InvalidConfigError as error:
        raise ApiError(
            400, "this server keeps no prefixes: it was started without a prefix cache"
        ) from error
    reason = output.outputs[0].finish_reason
    if reason == "abort":
        seconds = service.limits.request_seconds
        raise ApiError(503, f"the prefix was not computed within {seconds:g} seconds")
    if reason == "error":
        raise ApiError(500, "the server failed on this request; its log says why")


async def _unpin(name: str, tenant: Tenant, service: Service) -> None:
    key = engine_prefix_name(tenant, name)
    await service.engine.call_utility("drop_prefix", key)


async def _tokens(body: PrefixRequest, tenant: Tenant, service: Service) -> list[int]:
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
