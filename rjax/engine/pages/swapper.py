"""Swaps the pages of preempted sequences to host memory."""

import dataclasses

from rjax.batch.page_hash import group_key
from rjax.batch.page_operations import PageOperations
from rjax.batch.sequence import Sequence
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.groups import GroupPages, PageGroup
from rjax.engine.pages.host_pool import HostPool
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
        num_swaps: sequences swapped out so far.
    """

    blocks: BlockManager
    host: HostPool
    cost: PreemptionCost
    operations: PageOperations
    groups: GroupPages
    num_swaps: int = 0

    def swap_out(self, sequence: Sequence) -> bool:
        """Copy the pages of a running sequence to the host if that is cheaper than to recompute
        them, and they fit; never those of a model with states.

        Returns:
            Whether it was done. ``host_slots`` and ``num_saved`` of the sequence are set then.
        """
        if self.groups.states is not None:
            return False  # its states stay cached, and it computes what follows them again
        keys, wanted = sequence.hashes.keys[: sequence.num_registered], []
        tokens = sequence.num_stored
        for group in self.groups:
            unshared = self._unshared(group, sequence, len(keys))
            tokens = min(tokens, group.num_to_recompute(sequence.num_stored, len(unshared)))
            wanted += unshared
        choice = self.cost.choose(
            pages=len(wanted),
            tokens=tokens,
            has_siblings=sequence.has_live_siblings,
        )
        if choice == "recompute" or self.host.num_free < len(wanted) or not wanted:
            return False
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
        self.host.release(sequence.host_slots.values())
        sequence.host_slots = {}
        sequence.num_saved = 0
