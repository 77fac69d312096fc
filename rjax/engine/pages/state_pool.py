"""Reference counts of state pages, and which snapshot is evicted."""

import heapq
import itertools
from collections.abc import Iterable

from rjax.batch.page_hash import PageHashes
from rjax.engine.kv_events.event_log import STATES, EventLog
from rjax.engine.pages.block_manager import BlockManager, PageCounts
from rjax.engine.pages.snapshot_tree import SnapshotTree


class StatePool:
    """Allocates state pages, and finds snapshots again.

    A state page is *used* while it has an owner (a sequence or a pinned prefix), *cached* when it
    has no owner and is a snapshot, and *free* otherwise. Snapshots belong to the index of KV pages:
    one is registered only while all pages before it are there, and is a snapshot no more as soon as
    one of them is forgotten; without an owner it is free then.

    When no state page is free, the snapshot of least use is evicted, by GreedyDual (Cao and Irani,
    Cost-Aware WWW Proxy Caching Algorithms, 1997). A snapshot's priority is the clock at its last
    use plus the pages that are computed again without it; the clock is the highest priority evicted
    so far. So snapshots leave in the order of their last use, later where much would be computed
    again, and those of a long chain thin out evenly.

    Args:
        num_states: number of state pages.
        pages: the KV pages, with their index.
        events: where to note snapshots that enter and leave the cache; None notes nothing.
    """

    def __init__(
        self, num_states: int, pages: BlockManager, events: EventLog | None = None
    ) -> None:
        self.num_states = num_states
        self._pages, self._events = pages, events
        self._tree = SnapshotTree()
        self._free = list(range(num_states - 1, -1, -1))
        self._references = [0] * num_states
        self._cached: dict[int, tuple[int, int]] = {}  # clock and number of the last use
        self._queue: list[tuple[int, int, int]] = []  # priority, number of the use, state page
        self._clock = 0
        self._uses = itertools.count()
        self._new: set[int] = set()
        pages.on_forget = self._forget_behind

    @property
    def page_size(self) -> int:
        """Tokens of a page of KV, at whose end a state is."""
        return self._pages.page_size

    @property
    def num_available(self) -> int:
        """State pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PageCounts:
        """State pages by what they are."""
        available = self.num_available
        return PageCounts(
            free=len(self._free),
            used=self.num_states - available,
            cached=len(self._cached),
            total=self.num_states,
        )

    def references(self, state: int) -> int:
        """Number of owners of a state page."""
        return self._references[state]

    def begin_step(self) -> None:
        """Start to plan a step; all steps before it are dispatched."""
        self._new.clear()

    def find(self, key: bytes) -> int | None:
        """The snapshot behind the page of this chain key; takes no reference."""
        return self._tree.find(key)

    def is_new(self, state: int) -> bool:
        """Whether the present step computes a snapshot."""
        return state in self._new

    def is_snapshot(self, state: int) -> bool:
        """Whether a state page is found by its chain key."""
        return state in self._tree

    def acquire(self, state: int) -> None:
        """Take one more reference on a state page, used or cached."""
        if self._references[state] == 0:
            del self._cached[state]
        self._references[state] += 1

    def allocate(self) -> int | None:
        """Take a state page of unspecified content, with one reference; None if all are used."""
        if not self._free and self._cached:
            self._evict()
        if not self._free:
            return None
        state = self._free.pop()
        self._references[state] = 1
        return state

    def release(self, states: Iterable[int]) -> None:
        """Release one reference on each of these state pages."""
        for state in states:
            assert self._references[state] > 0, state
            self._references[state] -= 1
            if self._references[state] == 0:
                if state in self._tree:
                    self._cached[state] = self._clock, next(self._uses)
                    self._enqueue(state)
                else:
                    self._free.append(state)

    def register(self, state: int, hashes: PageHashes, number: int) -> None:
        """Make a used state page a snapshot; dispatched steps or the present one compute it.

        Nothing is done if there is a snapshot at this place, or a page before it is not cached.

        Args:
            state: the state page.
            hashes: chain of the tokens.
            number: page of the chain that the state follows.
        """
        if state not in self._tree and self._tree.add(
            hashes.keys[: number + 1], state, lambda key: self._pages.find(key) is not None
        ):
            self._new.add(state)
            if self._events is not None:
                key, parent = hashes.keys[number], hashes.parent(number)
                block, first = hashes.blocks[number], number == 0
                self._events.stored(key, parent, block, first=first, group=STATES)
            for behind in self._tree.next(state):  # less is computed again without them now
                if behind in self._cached:
                    self._enqueue(behind)

    def forget_cached(self) -> None:
        """Free every snapshot that has no owner."""
        for state in list(self._cached):
            self._remove(state)

    def _enqueue(self, state: int) -> None:
        heapq.heappush(self._queue, self._entry(state))
        if len(self._queue) > 2 * self.num_states:  # most are of uses before the last
            self._queue = [self._entry(each) for each in self._cached]
            heapq.heapify(self._queue)

    def _entry(self, state: int) -> tuple[int, int, int]:
        """(priority, number of the last use, state page) of a cached one."""
        clock, use = self._cached[state]
        return clock + self._tree.pages_to_last(state), use, state

    def _evict(self) -> None:
        """Free the snapshot of the lowest priority among those without an owner."""
        while True:
            entry = heapq.heappop(self._queue)
            _, use, state = entry
            if state not in self._cached or self._cached[state][1] != use:
                continue
            present = self._entry(state)  # higher if one before it has been evicted since
            if present <= entry:
                break
            heapq.heappush(self._queue, present)
        self._clock = max(self._clock, present[0])
        self._remove(state)

    def _forget_behind(self, key: bytes) -> None:
        """Remove the snapshots behind a page that has left the index of pages."""
        for state in self._tree.behind(key):
            self._remove(state)

    def _remove(self, state: int) -> None:
        """Remove a snapshot; without an owner it is free then."""
        if self._events is not None:
            self._events.removed(self._tree.key(state), group=STATES)
        self._tree.remove(state)
        self._new.discard(state)
        if state in self._cached:
            del self._cached[state]
            self._free.append(state)
