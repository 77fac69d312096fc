"""Finds the KV that exists for the leading tokens of a sequence."""

import dataclasses

from rjax.batch.page_hash import block_bytes
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.block_manager import BlockManager
from rjax.engine.host_pool import HostPool


@dataclasses.dataclass(slots=True)
class PrefixMatch:
    """KV of the leading tokens of a sequence.

    Attributes:
        pages: full pages on the device, in order.
        partial_page: a device page whose first tokens follow those of ``pages``, or None.
        host_slots: host slots of the pages after ``pages``; excludes a ``partial_page``.
        num_tokens: leading tokens of the sequence whose KV all these hold.
    """

    pages: list[int]
    partial_page: int | None = None
    host_slots: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PrefixMatcher:
    """Finds the longest cached prefix of a waiting or swapped sequence.

    Args:
        blocks: pages of the device.
        host: pages of the host.
        caching: whether pages of other requests may be used.
    """

    blocks: BlockManager
    host: HostPool
    caching: bool

    def match(self, sequence: Sequence) -> PrefixMatch | None:
        """The match, with no reference taken; None if the sequence waits for pending pages.

        A sample of a prompt waits until the first sample has computed the prompt. Any sequence
        waits for its next full page while a running sequence is about to compute it. Both can start
        in the step that computes what they wait for, because a step writes all KV of a layer before
        it reads any.
        """
        if sequence.status is SequenceStatus.SWAPPED:
            return self._match_swapped(sequence)
        leader = sequence.leader
        fresh = leader is not sequence and not sequence.output_token_ids
        if fresh and leader.status is SequenceStatus.RUNNING:
            return _fork(sequence, leader, self.blocks.page_size)
        S, most = self.blocks.page_size, sequence.most_cached
        if not (self.caching and most):
            return PrefixMatch([])
        if sequence.awaited is not None and self.blocks.is_pending(sequence.awaited):
            return None
        keys = self._keys(sequence)[: most // S]
        pages = self.blocks.match(keys)
        sequence.awaited = None
        if len(pages) < len(keys) and self.blocks.is_pending(keys[len(pages)]):
            sequence.awaited = keys[len(pages)]
            return None
        cached = len(pages) * S
        following = sequence.tokens(cached, min(cached + S, most))
        if following:
            parent = sequence.hashes.parent(len(pages))
            found = self.blocks.match_partial_page(parent, block_bytes(following))
            if found is not None:
                return PrefixMatch(pages, partial_page=found[0], num_tokens=cached + found[1])
        return PrefixMatch(pages, num_tokens=cached)

    def _match_swapped(self, sequence: Sequence) -> PrefixMatch:
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
        saved = min((len(pages) + len(slots)) * S, sequence.num_saved)
        return PrefixMatch(pages, host_slots=slots, num_tokens=saved)

    def _keys(self, sequence: Sequence) -> list[bytes]:
        hashes, S = sequence.hashes, self.blocks.page_size
        if len(hashes.keys) < sequence.num_known // S:
            start = len(hashes.keys) * S
            hashes.extend(sequence.tokens(start, sequence.num_known), start)
        return hashes.keys


def _fork(sequence: Sequence, leader: Sequence, page_size: int) -> PrefixMatch | None:
    """The pages of a running sibling that has the whole prompt; None if it has not."""
    length = len(sequence.prompt_token_ids)
    if leader.num_stored < length:
        return None
    full = length // page_size
    sequence.hashes.copy_from(leader.hashes, full)
    partial_page = leader.pages[full] if length % page_size else None
    return PrefixMatch(leader.pages[:full], partial_page=partial_page, num_tokens=length)
