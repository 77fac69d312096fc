"""Enters the pages of running sequences into the prefix cache."""

import dataclasses

from rjax.batch.page_hash import PageHashes, block_bytes, group_key
from rjax.batch.sequence import Sequence, SequenceStatus
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.groups import pages_numbered
from rjax.engine.pages.state_pages import StatePages


@dataclasses.dataclass(frozen=True, slots=True)
class PageRegistrar:
    """Registers pages under the chain keys of their tokens, in every page group.

    Attributes:
        blocks: pages of the pool.
        caching: whether there is a prefix cache.
        states: states of the layers that have them in place of KV; None without such layers.
    """

    blocks: BlockManager
    caching: bool
    states: StatePages | None = None

    def full_pages(self, sequence: Sequence) -> None:
        """Register the full pages of known tokens of a running sequence."""
        if not self.caching:
            return
        S = self.blocks.page_size
        full = min(sequence.num_stored, sequence.num_known) // S
        if full <= sequence.num_registered:
            if self.states is not None:
                self.states.register(sequence)
            return
        hashes = sequence.hashes
        if len(hashes.keys) < full:
            start = len(hashes.keys) * S
            hashes.extend(sequence.token_array(start, full * S), start)
        for n in range(sequence.num_registered, full):
            for group, page in pages_numbered(sequence, n):
                key, parent = group_key(hashes.keys[n], group), group_key(hashes.parent(n), group)
                self.blocks.register(page, key, parent, hashes.blocks[n], first=n == 0)
        sequence.num_registered = full
        if self.states is not None:
            self.states.register(sequence)

    def start_chain(self, sequence: Sequence, root: bytes) -> None:
        """Give a sequence page hashes with another root, between two steps, after the prefix cache
        has forgotten all KV; the pages and states of a running one are registered again."""
        sequence.hashes, sequence.awaited = PageHashes(root, self.blocks.page_size), None
        sequence.hashes.extend(sequence.token_array(0, sequence.num_known))
        if not self.caching or sequence.status is not SequenceStatus.RUNNING:
            return
        sequence.num_registered = 0
        self.full_pages(sequence)
        if self.states is not None:
            self.states.register_again(sequence)

    def partial_page(self, sequence: Sequence, known: int) -> None:
        """Register its full pages and the tokens after them, up to position ``known``."""
        self.full_pages(sequence)
        if self.caching and self.states is not None:
            self.states.register(sequence, last=True)
        number = sequence.num_registered
        start, stop = number * self.blocks.page_size, min(sequence.num_stored, known)
        if self.caching and start < stop and number >= sequence.num_borrowed:
            parent = sequence.hashes.parent(number)
            tokens = block_bytes(sequence.token_array(start, stop))
            for group, page in pages_numbered(sequence, number):
                self.blocks.register_partial(page, group_key(parent, group), tokens)
