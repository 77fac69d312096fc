"""A request on its way through the router to a replica."""

import dataclasses
from collections.abc import Callable

from starlette.types import Scope


@dataclasses.dataclass(slots=True, eq=False)
class ReplicaRequest:
    """One attempt to have an HTTP request answered by a replica. It stays in the gateway's process,
    where the router runs on another thread.

    Attributes:
        scope: the request's ASGI scope.
        body: the whole body.
        blocks: keys of the prompt, as `rjax.replicas.prefix_blocks` returns them.
        replica_tag: the replica that must get it, if it still runs; "" lets the router choose.
        avoided: tags of replicas that died on this request.
        routed_by: set by the router: "prefix", "overloaded", "new", "tag", or "" with Ray's own
            routers.
        chosen: the tag of the replica, once there is one.
        ended: whether the attempt is over.
        on_end: set by the router; called when the attempt is over.
    """

    scope: Scope
    body: bytes
    blocks: tuple[bytes, ...] = ()
    replica_tag: str = ""
    avoided: frozenset[str] = frozenset()
    routed_by: str = ""
    chosen: str = ""
    ended: bool = False
    on_end: Callable[[], object] = lambda: None

    def end(self) -> None:
        """The attempt is over."""
        self.ended = True
        self.on_end()
