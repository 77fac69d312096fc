"""Engine options of a request: priority, timeout, and the tenant's share and cache salt."""

import hashlib
import logging
from typing import Any

from rjax.serve.config.serve_config import ServeConfig
from rjax.serve.http.auth import Tenant
from rjax.serve.protocol.fields import shortened
from rjax.serve.protocol.requests import SamplingRequest

_log = logging.getLogger("rjax.serve.requests")


def engine_options(body: SamplingRequest, tenant: Tenant, config: ServeConfig) -> dict[str, Any]:
    """Log a request and return its options for the engine's ``add_request``."""
    # The text is a client's: repr escapes line breaks and everything else that does not print.
    user = repr(shortened(body.user)) if body.user else "-"
    _log.info("%s, user %s", tenant.name, user)
    options: dict[str, Any] = {"priority": body.priority or 0}
    return options | common_options(tenant, cache_salt(tenant, body.cache_salt), config)


def common_options(tenant: Tenant, salt: str | None, config: ServeConfig) -> dict[str, Any]:
    """The options that all requests of a tenant have: timeout, share of the rows, cache salt."""
    options: dict[str, Any] = {"timeout": config.limits.request_seconds}
    if tenant.has_key and not config.priority_across_keys:
        options["share"] = tenant.name
    if salt is not None:
        options["cache_salt"] = salt
    return options


def engine_prefix_name(tenant: Tenant, name: str) -> str:
    """The name of a tenant's prefix in the engine."""
    return f"{tenant.name}/{name}"


def cache_salt(tenant: Tenant, wanted: str | None) -> str | None:
    """The cache salt from the tenant's salt and the request's ``cache_salt``.

    Both are hashed together, so that no request can produce another tenant's salt.
    """
    if tenant.salt is None and wanted is None:
        return None
    return hashlib.sha256(repr((tenant.salt, wanted)).encode()).hexdigest()
