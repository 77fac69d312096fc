"""API keys, tenants and operators; each tenant has its own prefix cache."""

import base64
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
        is_operator: whether it may change the weights and the state of the engine.
    """

    name: str
    salt: str | None
    is_operator: bool = False

    @property
    def has_key(self) -> bool:
        """Whether it has an API key; without keys, all clients are one tenant."""
        return self.salt is not None


_ANYONE = Tenant("anyone", None, is_operator=True)
_SHORT = 16  # characters; a shorter key may be guessed


class KeyRing:
    """The accepted API keys. Without keys, all clients are one tenant, an operator.

    Args:
        keys: the accepted keys; printable ASCII characters without spaces around them.
        operator_keys: the keys of operators, which open every route.

    Raises:
        InvalidConfigError: a key is empty or not valid in a header, or is in both lists.
    """

    def __init__(self, keys: Sequence[str], operator_keys: Sequence[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants: list[tuple[bytes, Tenant]] = []
        if not set(keys).isdisjoint(operator_keys):
            raise InvalidConfigError(
                "an operator's key is an API key of clients too; give operators keys of their own"
            )
        for number, key in enumerate(dict.fromkeys(keys)):
            self._add(key, f"API key {number + 1}", f"key-{number + 1}", is_operator=False)
        for number, key in enumerate(dict.fromkeys(operator_keys)):
            name = f"operator-{number + 1}"
            self._add(key, f"operator's key {number + 1}", name, is_operator=True)

    def _add(self, key: str, what: str, name: str, *, is_operator: bool) -> None:
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise InvalidConfigError(
                f"{what} is {'not acceptable' if key else 'empty'}; give printable ASCII "
                "characters without spaces around them"
            )
        salt = hmac.new(self._secret, key.encode(), hashlib.sha256).hexdigest()
        self._tenants.append((key.encode(), Tenant(name, salt, is_operator)))

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
        """The tenant of an ``Authorization: Bearer KEY`` header, or of a ``Basic`` one whose
        password is the key, which clients send for a URL of the form http://any:KEY@host.

        All keys are compared, each in constant time.

        Raises:
            ApiError: 401.
        """
        if self.open:
            return _ANYONE
        given = _given_key(authorization or "")
        found: Tenant | None = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, given):
                found = tenant
        if found is None:
            raise ApiError(
                401, "give a valid API key: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return found


def _given_key(authorization: str) -> bytes:
    """The key of a header; empty for another scheme or form."""
    scheme, _, text = authorization.partition(" ")
    given = text.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "bearer":
        return given
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def authenticate(request: Request) -> Tenant:
    """Router dependency of every route that needs a key."""
    keys: KeyRing = request.app.state.keys
    return keys.tenant(request.headers.get("authorization"))


async def authenticate_operator(request: Request) -> Tenant:
    """Router dependency of every route that only operators may call.

    A web page can send requests to an address of its visitor's machine. A browser says so in the
    header ``Origin``, and a server without keys refuses such requests here.

    Raises:
        ApiError: 401 without a valid key, 403 with a client's key or from a web page.
    """
    tenant = await authenticate(request)
    if not tenant.is_operator:
        raise ApiError(
            403,
            "this key is not an operator's; only those of --operator-key-file may call this route",
            code="operators_only",
        )
    if not tenant.has_key and "origin" in request.headers:
        raise ApiError(
            403,
            "this server has no keys and does not let web pages call this route; start it with "
            "--operator-key-file, or send the request without the header Origin",
            code="operators_only",
        )
    return tenant
