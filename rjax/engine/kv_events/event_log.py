"""Collects what the prefix cache stores and removes, on the engine's thread."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

KV, STATES = 0, 1
"""Groups of events: pages of the first page group, and snapshots of states at ends of pages."""


class Stored(NamedTuple):
    """A page, or the state at its end, entered the prefix cache.

    Attributes:
        key: chain key of its tokens.
        parent: chain key of the page before it; the root key of the chain for its first page.
        block: its tokens as int32 bytes.
        first: whether it is the first page of its chain.
        group: KV or STATES.
    """

    key: bytes
    parent: bytes
    block: bytes
    first: bool
    group: int = KV


class Removed(NamedTuple):
    """A page, or the state at its end, left the prefix cache.

    Attributes:
        key: chain key of its tokens.
        group: KV or STATES.
    """

    key: bytes
    group: int = KV


class Cleared(NamedTuple):
    """The prefix cache became empty."""


type CacheEvent = Stored | Removed | Cleared


@dataclasses.dataclass(slots=True)
class EventLog:
    """Events since the last `flush`, in order. Adding one costs a list entry.

    Attributes:
        publish: callback that is given the events; must not wait.
        events: the events since the last `flush`, in order.
    """

    publish: Callable[[list[CacheEvent]], None]
    events: list[CacheEvent] = dataclasses.field(default_factory=list)

    def stored(
        self, key: bytes, parent: bytes, block: bytes, *, first: bool, group: int = KV
    ) -> None:
        """A page or a state entered the cache; see `Stored`."""
        self.events.append(Stored(key, parent, block, first, group))

    def removed(self, key: bytes, group: int = KV) -> None:
        """A page or a state left the cache."""
        self.events.append(Removed(key, group))

    def cleared(self) -> None:
        """The cache became empty, at a user's request: published at once."""
        self.events.append(Cleared())
        self.flush()

    def flush(self) -> None:
        """Publish the events."""
        if self.events:
            taken, self.events = self.events, []
            self.publish(taken)
