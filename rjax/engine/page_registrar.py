"""Enters the pages of running sequences into the prefix cache."""

import dataclasses

from rjax.batch.page_hash import block_bytes, group_key
from rjax.batch.sequence import Sequence
from rjax.engine.block_manager import BlockManager
from rjax.engine.window_pages import WindowPages


@dataclasses.dataclass(frozen=True, slots=True)
class PageRegistrar:
    """Registers pages under the chain keys of their tokens, in every page group.

    Attributes:
        blocks: pages of the pool.
        caching: whether there is a prefix cache.
        windows: pages of layers with windows; None without such layers.
    """

    blocks: BlockManager
    caching: bool
    windows: WindowPages | None

    def full_pages(self, sequence: Sequence) -> None:
        """Register the full pages of known tokens of a running sequence."""
        if not self.caching:
            return
        S = self.blocks.page_size
        full = min(sequence.num_stored, sequence.num_known) // S
        if full <= sequence.num_registered:
            return
        hashes = sequence.hashes
        if len(hashes.keys) < full:
            start = len(hashes.keys) * S
            hashes.extend(sequence.token_array(start, full * S), start)
        for n in range(sequence.num_registered, full):
            for group, page in pages_numbered(sequence, n, self.windows):
                key, parent = group_key(hashes.keys[n], group), group_key(hashes.parent(n), group)
                self.blocks.register(page, key, parent, hashes.blocks[n], first=n == 0)
        sequence.num_registered = full

    def partial_page(self, sequence: Sequence, known: int) -> None:
        """Register its full pages and the tokens after them, up to position ``known``."""
        self.full_pages(sequence)
        number = sequence.num_registered
        start, stop = number * self.blocks.page_size, min(sequence.num_stored, known)
        if self.caching and start < stop and number >= sequence.num_borrowed:
            parent = sequence.hashes.parent(number)
            tokens = block_bytes(sequence.token_array(start, stop))
            for group, page in pages_numbered(sequence, number, self.windows):
                self.blocks.register_partial(page, group_key(parent, group), tokens)


def pages_numbered(
    sequence: Sequence, number: int, windows: WindowPages | None
) -> list[tuple[int, int]]:
    """(page group, page) of one page number, in the groups in which the sequence holds it."""
    if windows is None:
        return [(0, sequence.pages[number])]
    found = [(0, sequence.pages[number])] if windows.first_group else []
    of_windows = windows.groups(sequence)
    return found + [(group, pages[number]) for group, pages in of_windows if pages[number] >= 0]
