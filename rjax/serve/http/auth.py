"""API keys and tenants; each tenant has its own prefix cache."""

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Sequence

from fastapi import Request

from rjax.errors import InvalidConfigError
from rjax.serve.protocol.errors import ApiError


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of a request.

    Attributes:
        name: the tenant's name in logs.
        salt: salt of the prefix cache's keys. It isolates tenants, so that prefill times reveal
            nothing about another tenant's prompts. None if the server has no keys.
    """

    name: str
    salt: str | None

    @property
    def has_key(self) -> bool:
        """Whether it has an API key; without keys, all clients are one tenant."""
        return self.salt is not None


_ANYONE = Tenant("anyone", None)
_SHORT = 16  # characters; a shorter key may be guessed


class KeyRing:
    """The accepted API keys. Without keys, all clients are one tenant.

    Args:
        keys: the accepted keys; printable ASCII characters without spaces around them.

    Raises:
        InvalidConfigError: a key is empty or not valid in a header.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        secret = secrets.token_bytes(32)
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, key in enumerate(dict.fromkeys(keys)):
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise InvalidConfigError(
                    f"API key {number + 1} is {'not acceptable' if key else 'empty'}; give "
                    "printable ASCII characters without spaces around them"
                )
            salt = hmac.new(secret, key.encode(), hashlib.sha256).hexdigest()
            self._tenants.append((key.encode(), Tenant(f"key-{number + 1}", salt)))

    @property
    def tenants(self) -> list[Tenant]:
        """All tenants."""
        return [tenant for _, tenant in self._tenants] or [_ANYONE]

    @property
    def num_short(self) -> int:
        """Number of keys that are short enough to be guessed."""
        return sum(len(key) < _SHORT for key, _ in self._tenants)

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._tenants

    def tenant(self, authorization: str | None) -> Tenant:
        """The tenant of an ``Authorization: Bearer KEY`` header.

        All keys are compared, each in constant time.

        Raises:
            ApiError: 401.
        """
        if self.open:
            return _ANYONE
        scheme, _, given = (authorization or "").partition(" ")
        found: Tenant | None = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, given.strip().encode("utf-8", "surrogateescape")):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return found


async def authenticate(request: Request) -> Tenant:
    """Router dependency of every route that needs a key."""
    keys: KeyRing = request.app.state.keys
    return keys.tenant(request.headers.get("authorization"))
