"""What of a request goes to the engine besides prompt and sampling."""

import hashlib
from typing import Any

from rjax.serve.auth import Tenant
from rjax.serve.requests import SamplingBody


def engine_options(body: SamplingBody, tenant: Tenant) -> dict[str, Any]:
    """Options of the engine's ``add_request``."""
    options: dict[str, Any] = {"priority": body.priority or 0}
    salt = cache_salt(tenant, body.cache_salt)
    if salt is not None:
        options["cache_salt"] = salt
    return options


def cache_salt(tenant: Tenant, wanted: str | None) -> str | None:
    """The salt of a tenant's prompts, and of those that a request sets apart itself.

    The two are hashed together, so that no request can spell another tenant's salt.
    """
    if tenant.salt is None and wanted is None:
        return None
    return hashlib.sha256(repr((tenant.salt, wanted)).encode()).hexdigest()
