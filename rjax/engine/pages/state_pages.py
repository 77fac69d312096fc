"""The states that sequences hold of layers with a state in place of KV."""

import dataclasses
import sys

import numpy as np
from jaxtyping import Int

from rjax.batch.page_hash import PageHashes, group_key
from rjax.batch.sequence import Sequence
from rjax.engine.pages.block_manager import BlockManager

STATES_OF_A_SEQUENCE = 2
"""States that a running sequence holds in the step that fills a page; one otherwise."""

_GROUP = 255  # in the keys of states


@dataclasses.dataclass(frozen=True, slots=True)
class StatePages:
    """State pages: each holds the states of all such layers at the end of a page of tokens.

    A running sequence holds the state at the end of its last full page, which the tokens since then
    follow. Some are snapshots, which the prefix cache keeps for later prompts: at every
    ``stride``-th end, where the cache has KV up to there but no state, so that prompts part there,
    and the last one of a prompt and of a sequence that ends. They are evicted like pages; the
    others are free once the sequence has gone on.

    Args:
        blocks: the state pages.
        table: row s lists the state pages of the sequence in slot s, by page number.
        stride: pages between two snapshots.
        caching: whether there is a prefix cache.
    """

    blocks: BlockManager
    table: Int[np.ndarray, "slots M"]
    stride: int
    caching: bool

    def longest(self, sequence: Sequence, keys: list[bytes], end: int) -> int | None:
        """How many leading pages of a chain have a cached state behind them; at least one token of
        the sequence comes after them.

        None if the present step computes that state: the sequence can start in the next one.

        Args:
            sequence: the sequence that is to start.
            keys: its chain.
            end: most pages.
        """
        end = min(end, (sequence.num_tokens - 1) // self.blocks.page_size)
        while end > 0:
            page = self._find(keys[end - 1])
            if page is not None:
                return None if self.blocks.is_new(page) else end
            end -= 1
        return 0

    def may_start(self, num_running: int) -> bool:
        """Whether there are state pages for one more sequence beside the running ones."""
        return self.blocks.num_available >= STATES_OF_A_SEQUENCE + num_running // 4

    def start(self, sequence: Sequence, end: int, branch: int) -> None:
        """Set the state that a sequence starts from.

        Args:
            sequence: a sequence that has just got its slot.
            end: pages before it, as ``longest`` found them.
            branch: pages whose KV is cached: a snapshot is kept behind them.
        """
        sequence.states, sequence.state_branch = [-1] * end, branch
        sequence.num_states_registered, sequence.num_states_released = end, max(0, end - 1)
        if end:
            page = self._find(sequence.hashes.keys[end - 1])
            assert page is not None
            self.blocks.acquire([page])
            self._set(sequence, end - 1, page)

    def extend(self, sequence: Sequence, stop: int) -> int:
        """Allocate states for the tokens up to ``stop``; returns up to where there were enough."""
        first, last = len(sequence.states), stop // self.blocks.page_size
        if last <= first:
            return stop
        fresh = self.blocks.allocate(1)
        if fresh is None:
            return self.capacity(sequence)
        sequence.states += [-1] * (last - first)
        self.table[sequence.slot, first:last] = -1
        self._set(sequence, last - 1, fresh[0])
        for number in range(first, last - 1):
            if self._is_snapshot(sequence, number):
                found = self.blocks.allocate(1)
                if found is None:
                    break
                self._set(sequence, number, found[0])
        return stop

    def capacity(self, sequence: Sequence) -> int:
        """Tokens that can be computed without a further state."""
        return (len(sequence.states) + 1) * self.blocks.page_size - 1

    def next_release_at(self, sequence: Sequence) -> int:
        """Computed tokens from which the sequence needs one state only."""
        if sum(page >= 0 for page in sequence.states[sequence.num_states_released :]) < 2:
            return sys.maxsize
        return len(sequence.states) * self.blocks.page_size

    def release_unreached(self, sequence: Sequence) -> None:
        """Release all states but the last, once that is computed."""
        states, start = sequence.states, sequence.num_states_released
        stop = len(states) - 1
        if stop > start and sequence.num_computed >= len(states) * self.blocks.page_size:
            self.blocks.release([page for page in states[start:stop] if page >= 0])
            states[start:stop] = [-1] * (stop - start)
            sequence.num_states_released = stop

    def register(self, sequence: Sequence, *, last: bool = False) -> None:
        """Register the computed snapshots of a running sequence, whose chain keys are known.

        last: the last state is a snapshot.
        """
        start = sequence.num_states_registered
        stop = min(sequence.num_computed, sequence.num_known) // self.blocks.page_size
        numbers = [n for n in range(start, stop) if self._is_snapshot(sequence, n)]
        if last and stop:
            numbers.append(stop - 1)
        for number in numbers:
            page = sequence.states[number]
            if page >= 0:
                self._register(sequence.hashes, number, page)
        sequence.num_states_registered = max(start, stop)

    def pin(self, key: bytes) -> int | None:
        """Take a reference on the cached state behind the page of this chain key; None for none."""
        page = self._find(key)
        if page is not None:
            self.blocks.acquire([page])
        return page

    def place(self, hashes: PageHashes) -> int | None:
        """A state page for the end of a chain, with a reference, which the caller must fill before
        the next step; None if the running sequences hold all."""
        fresh = self.blocks.allocate(1)
        if fresh is not None:
            self._register(hashes, len(hashes.keys) - 1, fresh[0])
        return None if fresh is None else fresh[0]

    def release(self, sequence: Sequence) -> None:
        """Release all states of a sequence."""
        held = sequence.states[sequence.num_states_released :]
        self.blocks.release([page for page in held if page >= 0])
        sequence.states, sequence.num_states_released = [], 0

    def _register(self, hashes: PageHashes, number: int, page: int) -> None:
        keys = hashes.keys[number], hashes.parent(number)
        key, parent = (group_key(each, _GROUP) for each in keys)
        self.blocks.register(page, key, parent, hashes.blocks[number])

    def _find(self, key: bytes) -> int | None:
        return self.blocks.find(group_key(key, _GROUP))

    def _set(self, sequence: Sequence, number: int, page: int) -> None:
        sequence.states[number] = page
        self.table[sequence.slot, number] = page

    def _is_snapshot(self, sequence: Sequence, number: int) -> bool:
        behind = number + 1
        return self.caching and (behind == sequence.state_branch or behind % self.stride == 0)
