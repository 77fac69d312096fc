"""What of a sequence need not be computed: pages of the tree, of a sibling, or of the host."""

import dataclasses

from rjax.batch.page_hash import block_bytes
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.block_manager import BlockManager
from rjax.engine.host_pool import HostPool


@dataclasses.dataclass(slots=True)
class Beginning:
    """KV that exists for the leading tokens of a sequence.

    Attributes:
        pages: full pages on the device, in order.
        tail: a device page that begins with the tokens after them, or None.
        slots: host slots of the pages after ``pages``; then there is no tail.
        stored: tokens that all these hold of the sequence.
    """

    pages: list[int]
    tail: int | None = None
    slots: list[int] = dataclasses.field(default_factory=list)
    stored: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class BeginningFinder:
    """Looks for the longest beginning of a waiting or swapped sequence.

    Args:
        blocks: the device's pages.
        host: the host's.
        caching: whether pages of other requests may serve.
    """

    blocks: BlockManager
    host: HostPool
    caching: bool

    def find(self, sequence: Sequence) -> Beginning | None:
        """The beginning, with no reference taken; None to wait for pages under way.

        A sample of a prompt waits until the first sample has computed it; any sequence waits for
        its next full page while a running one is about to compute it. Both can start in the very
        step that computes what they wait for, since a step writes all KV of a layer before it
        reads any.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._find_swapped(sequence)
        leader = sequence.leader
        fresh = leader is not sequence and not sequence.output_token_ids
        if fresh and leader.status is SequenceStatus.RUNNING:
            return _fork(sequence, leader, self.blocks.page_size)
        S, most = self.blocks.page_size, sequence.most_cached
        if not (self.caching and most):
            return Beginning([])
        if sequence.awaited is not None and self.blocks.is_promised(sequence.awaited):
            return None
        keys = self._keys(sequence)[: most // S]
        pages = self.blocks.match(keys)
        sequence.awaited = None
        if len(pages) < len(keys) and self.blocks.is_promised(keys[len(pages)]):
            sequence.awaited = keys[len(pages)]
            return None
        stored = len(pages) * S
        wanted = sequence.tokens(stored, min(stored + S, most))
        parent = sequence.hashes.parent(len(pages))
        found = self.blocks.match_tail(parent, block_bytes(wanted)) if wanted else None
        if found is None:
            return Beginning(pages, stored=stored)
        return Beginning(pages, tail=found[0], stored=stored + found[1])

    def _find_swapped(self, sequence: Sequence) -> Beginning:
        S = self.blocks.page_size
        full, rest = divmod(sequence.num_saved, S)
        keys = self._keys(sequence)[:full] if self.caching else []
        pages = self.blocks.match(keys)
        slots = []
        for number in range(len(pages), full + bool(rest)):
            slot = sequence.host_slots.get(number)
            if slot is None and number < len(keys):
                slot = self.host.find(keys[number])
            if slot is None:
                break
            slots.append(slot)
        stored = min((len(pages) + len(slots)) * S, sequence.num_saved)
        return Beginning(pages, slots=slots, stored=stored)

    def _keys(self, sequence: Sequence) -> list[bytes]:
        hashes, S = sequence.hashes, self.blocks.page_size
        if len(hashes.keys) < sequence.num_known // S:
            start = len(hashes.keys) * S
            hashes.extend(sequence.tokens(start, sequence.num_known), start)
        return hashes.keys


def _fork(sequence: Sequence, leader: Sequence, page_size: int) -> Beginning | None:
    """Share the pages of a running sibling that has the whole prompt; None while it has not."""
    length = len(sequence.prompt_token_ids)
    if leader.num_stored < length:
        return None
    full = length // page_size
    sequence.hashes.copy_from(leader.hashes, full)
    tail = leader.pages[full] if length % page_size else None
    return Beginning(leader.pages[:full], tail=tail, stored=length)
