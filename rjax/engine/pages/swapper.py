"""Swaps the pages of preempted sequences to host memory."""

import dataclasses

from rjax.batch.page_hash import group_key
from rjax.batch.page_operations import PageOperations
from rjax.batch.sequence import Sequence
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.groups import GroupPages, PageGroup
from rjax.engine.pages.host_pool import HostPool
from rjax.engine.pages.state_swapper import StateSwapper
from rjax.engine.preemption import PreemptionCost


@dataclasses.dataclass(slots=True)
class Swapper:
    """Saves the pages of a sequence in host slots.

    Attributes:
        blocks: pages of the device.
        host: slots of the host.
        cost: decides between swapping and recomputing.
        operations: page operations of the next step; copies to the host are added to them.
        groups: the page groups.
        page_bytes: bytes of a page.
        states: saves the states of sequences; None of a model without.
        num_swaps: sequences swapped out so far.
    """

    blocks: BlockManager
    host: HostPool
    cost: PreemptionCost
    operations: PageOperations
    groups: GroupPages
    page_bytes: int
    states: StateSwapper | None = None
    num_swaps: int = 0

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy the pages and the state of a running sequence to the host if that is cheaper than to
        recompute them, and they fit.

        Returns:
            Whether it was done. ``host_slots``, ``num_saved`` and ``saved_state`` of the sequence
            are set then.
        """
        state = None
        if self.states is not None:
            state = self.states.plan(sequence)
            if state is None:
                return False
        keys, wanted = sequence.hashes.keys[: sequence.num_registered], []
        tokens = sequence.num_stored
        for group in self.groups:
            unshared = self._unshared(group, sequence, len(keys))
            tokens = min(tokens, group.num_to_recompute(sequence.num_stored, len(unshared)))
            wanted += unshared
        size = float(len(wanted))
        if self.states is not None and state is not None:
            first = min((number for _, number, _ in wanted), default=len(keys))
            tokens = self.states.num_to_recompute(sequence, first)
            size += self.states.num_bytes(state) / self.page_bytes
        choice = self.cost.choose(
            pages=size, tokens=tokens, has_siblings=sequence.has_live_siblings
        )
        if choice == "recompute" or not size or self.host.num_free < len(wanted):
            return False
        if self.states is not None and state is not None:
            if not self.states.has_room(state):
                return False
            self.states.save(sequence, state)
        pages, slots = [], []
        for group, number, page in wanted:
            key = group_key(keys[number], group) if number < len(keys) else None
            slot = None if key is None else self.host.find(key)
            if slot is not None:
                self.host.acquire(slot)
            else:
                slot = self.host.allocate(key)
                assert slot is not None
                pages.append(page)
                slots.append(slot)
            sequence.host_slots[group, number] = slot
        sequence.num_saved = sequence.num_stored
        if pages:
            self.operations.swap_out(pages, slots)
        self.num_swaps += 1
        return True

    def _unshared(
        self, group: PageGroup, sequence: Sequence, num_keys: int
    ) -> list[tuple[int, int, int]]:
        """(group, number, page) of the pages to save that the next token reaches.

        A page with a key and other owners stays on the device and is found again by its key.
        """
        start = group.first_page(min(sequence.num_stored, sequence.num_tokens - 1))
        start = max(start, sequence.num_released[group.index])
        pages = sequence.pages[group.index][start : group.pages_for(sequence.num_stored)]
        return [
            (group.index, number, page)
            for number, page in enumerate(pages, start)
            if number >= num_keys or self.blocks.references(page) == 1
        ]

    def release(self, sequence: Sequence) -> None:
        """Free the host slots of a sequence."""
        if self.states is not None:
            self.states.release(sequence)
        self.host.release(sequence.host_slots.values())
        sequence.host_slots = {}
        sequence.num_saved = 0
