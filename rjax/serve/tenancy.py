"""What of a request goes to the engine besides prompt and sampling."""

import hashlib
import logging
from typing import Any

from rjax.serve.auth import Tenant
from rjax.serve.limits import ServeLimits
from rjax.serve.requests import SamplingRequest

_log = logging.getLogger("rjax.serve.requests")


def engine_options(body: SamplingRequest, tenant: Tenant, limits: ServeLimits) -> dict[str, Any]:
    """Options of the engine's ``add_request``; the request is logged."""
    _log.info("%s, user %s", tenant.name, body.user or "-")
    options: dict[str, Any] = {"priority": body.priority or 0, "timeout": limits.request_seconds}
    salt = cache_salt(tenant, body.cache_salt)
    if salt is not None:
        options["cache_salt"] = salt
    return options


def engine_prefix_name(tenant: Tenant, name: str) -> str:
    """The engine's name of a tenant's prefix."""
    return f"{tenant.name}/{name}"


def cache_salt(tenant: Tenant, wanted: str | None) -> str | None:
    """The salt of a tenant's prompts, and of those that a request sets apart itself.

    The two are hashed together, so that no request can spell another tenant's salt.
    """
    if tenant.salt is None and wanted is None:
        return None
    return hashlib.sha256(repr((tenant.salt, wanted)).encode()).hexdigest()
