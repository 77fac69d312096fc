"""A request on its way from the gateway to a replica."""

import dataclasses
from typing import Any

from starlette.types import Message, Scope

_SCOPE_KEYS = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path"),
    *("query_string", "root_path", "headers", "client", "server"),
)


@dataclasses.dataclass(slots=True)
class ReplicaRequest:
    """One HTTP request, in plain values.

    Attributes:
        scope: of ASGI, without what belongs to the server's process.
        body: all of it.
        blocks: keys of the prompt, as `rjax.replicas.prefix_blocks` returns them.
        replica_tag: the replica that must get it, if it still runs; "" lets the router choose.
        routed_by: set by the router, in the copy of the request that the replica gets: "prefix",
            "overloaded", "new", "tag", or "" with Ray's own routers.
    """

    scope: dict[str, Any]
    body: bytes
    blocks: tuple[bytes, ...] = ()
    replica_tag: str = ""
    routed_by: str = ""


def plain_scope(scope: Scope) -> dict[str, Any]:
    """The values of an ASGI scope that another process can use."""
    return {key: scope[key] for key in _SCOPE_KEYS if key in scope}


type Messages = list[Message]
"""Consecutive ASGI messages of a response."""
