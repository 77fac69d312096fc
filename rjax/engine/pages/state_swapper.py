"""Swaps the states of preempted sequences to host memory."""

import dataclasses

from rjax.batch.page_operations import PageOperations, SwapInState, SwapOutState
from rjax.batch.sequence import SavedState, Sequence
from rjax.batch.step_worker import StatePoolSize
from rjax.engine.pages.host_pool import HostPool
from rjax.engine.pages.state_pages import StatePages


@dataclasses.dataclass(frozen=True, slots=True)
class StateSwapper:
    """Saves the state that a sequence goes on from, and sets the one that it starts from: its state
    page, and the tail of its slot.

    A state page that is a snapshot with other owners stays on the device, as pages do, and is found
    again by its key.

    Attributes:
        states: states of the sequences.
        host: host slots, each for a state page and a tail.
        size: bytes of both.
        operations: page operations of the next step; copies are added to them.
    """

    states: StatePages
    host: HostPool
    size: StatePoolSize
    operations: PageOperations

    def plan(self, sequence: Sequence) -> SavedState | None:
        """What to save of a running sequence; None if it cannot go on where it is.

        That is so if nothing is computed, or if the last token is to be computed again: a tail goes
        on behind its tokens only.
        """
        pool, computed = self.states.pool, sequence.num_computed
        if not 0 < computed < sequence.num_tokens:
            return None
        end, tail = divmod(computed, pool.page_size)
        page = sequence.states[end - 1] if end else None
        shared = page is None or (pool.is_snapshot(page) and pool.references(page) > 1)
        return SavedState(computed, has_page=not shared, has_tail=tail > 0)

    def num_bytes(self, saved: SavedState) -> int:
        """Bytes to copy."""
        return saved.has_page * self.size.state_bytes + saved.has_tail * self.size.tail_bytes

    def has_room(self, saved: SavedState) -> bool:
        """Whether the host has a slot for it."""
        return self.host.num_free > 0 or not (saved.has_page or saved.has_tail)

    def num_to_recompute(self, sequence: Sequence, first: int) -> int:
        """Tokens to compute again of a sequence that loses the pages from number ``first`` on, with
        the states behind them."""
        keys = sequence.hashes.keys[:first]
        while keys and self.states.pool.find(keys[-1]) is None:
            keys.pop()
        return sequence.num_computed - len(keys) * self.states.pool.page_size

    def save(self, sequence: Sequence, saved: SavedState) -> None:
        """Save the state of a running sequence, as planned."""
        if saved.has_page or saved.has_tail:
            host_slot = self.host.allocate(None)
            assert host_slot is not None
            saved = dataclasses.replace(saved, host_slot=host_slot)
            end = saved.num_computed // self.states.pool.page_size
            page = sequence.states[end - 1] if saved.has_page else None
            slot = sequence.slot if saved.has_tail else None
            self.operations.swap_state(SwapOutState(page, slot, host_slot))
        sequence.saved_state = saved

    def start(self, sequence: Sequence, saved: SavedState | None, end: int, branch: int) -> None:
        """Set the state that a sequence starts from.

        Args:
            sequence: a sequence that has just got its slot.
            saved: its saved state; None to start from a snapshot.
            end, branch: see `StatePages.start`.
        """
        page = None
        if saved is not None and saved.has_page:
            page = self.states.pool.allocate()
            assert page is not None, "`StatePages.may_start` leaves some"
        self.states.start(sequence, end, branch, page)
        if saved is not None and saved.host_slot is not None:
            slot = sequence.slot if saved.has_tail else None
            self.operations.swap_state(SwapInState(saved.host_slot, page, slot))

    def release(self, sequence: Sequence) -> None:
        """Free the host slot of a sequence."""
        if sequence.saved_state is not None and sequence.saved_state.host_slot is not None:
            self.host.release([sequence.saved_state.host_slot])
        sequence.saved_state = None
