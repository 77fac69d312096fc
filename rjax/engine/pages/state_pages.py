"""The states that sequences hold of layers with a state in place of KV."""

import dataclasses
import sys

import numpy as np
from jaxtyping import Int

from rjax.batch.sequence import Sequence
from rjax.engine.pages.state_pool import StatePool

STATES_OF_A_SEQUENCE = 2
"""States that a running sequence holds in the step that fills a page; one otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class StatePages:
    """State pages: each holds the states of all such layers at the end of a page of tokens.

    A running sequence holds the state at the end of its last full page, which the tokens since then
    follow. Some are snapshots, which the prefix cache keeps for later prompts: at every
    ``stride``-th end, where the cache has KV up to there but no state, so that prompts part there,
    and the last one of a prompt and of a sequence that ends. The others are free once the sequence
    has gone on.

    Args:
        pool: the state pages.
        table: row s lists the state pages of the sequence in slot s, by page number.
        stride: pages between two snapshots.
        caching: whether there is a prefix cache.
    """

    pool: StatePool
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
        end = min(end, (sequence.num_tokens - 1) // self.pool.page_size)
        while end > 0:
            page = self.pool.find(keys[end - 1])
            if page is not None:
                return None if self.pool.is_new(page) else end
            end -= 1
        return 0

    def may_start(self, num_running: int) -> bool:
        """Whether there are state pages for one more sequence beside the running ones."""
        return self.pool.num_available >= STATES_OF_A_SEQUENCE + num_running // 4

    def start(self, sequence: Sequence, end: int, branch: int, restored: int | None = None) -> None:
        """Set the state that a sequence starts from.

        Args:
            sequence: a sequence that has just got its slot.
            end: pages before it, as ``longest`` found them.
            branch: pages whose KV is cached: a snapshot is kept behind them.
            restored: a state page, with a reference, which the host fills before the next step;
                None takes the snapshot behind these pages.
        """
        sequence.states, sequence.state_branch = [-1] * end, branch
        sequence.num_states_registered = sequence.num_states_released = max(0, end - 1)
        if end:
            page = restored
            if page is None:
                sequence.num_states_registered = end
                page = self.pin(sequence.hashes.keys[end - 1])
                assert page is not None
            self._set(sequence, end - 1, page)

    def extend(self, sequence: Sequence, stop: int) -> int:
        """Allocate states for the tokens up to ``stop``; returns up to where there were enough."""
        first, last = len(sequence.states), stop // self.pool.page_size
        if last <= first:
            return stop
        fresh = self.pool.allocate()
        if fresh is None:
            return self.capacity(sequence)
        sequence.states += [-1] * (last - first)
        self.table[sequence.slot, first:last] = -1
        self._set(sequence, last - 1, fresh)
        for number in range(first, last - 1):
            if self._is_snapshot(sequence, number):
                found = self.pool.allocate()
                if found is None:
                    break
                self._set(sequence, number, found)
        return stop

    def capacity(self, sequence: Sequence) -> int:
        """Tokens that can be computed without a further state."""
        return (len(sequence.states) + 1) * self.pool.page_size - 1

    def next_release_at(self, sequence: Sequence) -> int:
        """Computed tokens from which the sequence needs one state only."""
        if sum(page >= 0 for page in sequence.states[sequence.num_states_released :]) < 2:
            return sys.maxsize
        return len(sequence.states) * self.pool.page_size

    def release_unreached(self, sequence: Sequence) -> None:
        """Release all states but the last, once that is computed."""
        states, start = sequence.states, sequence.num_states_released
        stop = len(states) - 1
        if stop > start and sequence.num_computed >= len(states) * self.pool.page_size:
            self.pool.release([page for page in states[start:stop] if page >= 0])
            states[start:stop] = [-1] * (stop - start)
            sequence.num_states_released = stop

    def register(self, sequence: Sequence, *, last: bool = False) -> None:
        """Register the computed snapshots of a running sequence, whose chain keys are known.

        last: the last state is a snapshot.
        """
        start = sequence.num_states_registered
        stop = min(sequence.num_computed, sequence.num_known) // self.pool.page_size
        numbers = [n for n in range(start, stop) if self._is_snapshot(sequence, n)]
        if last and stop:
            numbers.append(stop - 1)
        for number in numbers:
            page = sequence.states[number]
            if page >= 0:
                self.pool.register(page, sequence.hashes, number)
        sequence.num_states_registered = max(start, stop)

    def register_again(self, sequence: Sequence) -> None:
        """Register the snapshots of a running sequence under new chain keys."""
        for number in range(sequence.num_states_released, sequence.num_states_registered):
            page = sequence.states[number]
            if page >= 0:
                self.pool.register(page, sequence.hashes, number)

    def pin(self, key: bytes) -> int | None:
        """Take a reference on the snapshot behind the page of this chain key; None for none."""
        page = self.pool.find(key)
        if page is not None:
            self.pool.acquire(page)
        return page

    def release(self, sequence: Sequence) -> None:
        """Release all states of a sequence."""
        held = sequence.states[sequence.num_states_released :]
        self.pool.release([page for page in held if page >= 0])
        sequence.states, sequence.num_states_released = [], 0

    def _set(self, sequence: Sequence, number: int, page: int) -> None:
        sequence.states[number] = page
        self.table[sequence.slot, number] = page

    def _is_snapshot(self, sequence: Sequence, number: int) -> bool:
        behind = number + 1
        return self.caching and (behind == sequence.state_branch or behind % self.stride == 0)
