"""Page groups: the pages that sequences hold of layers whose KV lives equally long."""

import dataclasses
import sys
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from rjax.batch.page_groups import first_page
from rjax.batch.page_hash import group_key
from rjax.batch.sequence import Sequence
from rjax.engine.pages.block_manager import BlockManager
from rjax.engine.pages.state_pages import StatePages


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroup:
    """The pages of the layers with one window; full attention is a window without end.

    Pages of a group without end are allocated for all present tokens at admission. Other groups get
    pages for each prompt chunk, and release those that the next token does not reach.

    Args:
        index: index among the page groups.
        window: sliding window, in tokens; None has no end.
        blocks: pages of the pool, which serves all page groups.
        table: page table of the group; row s is that of the sequence in slot s.
    """

    index: int
    window: int | None
    blocks: BlockManager
    table: Int[np.ndarray, "slots M"]

    @property
    def endless(self) -> bool:
        """Whether a sequence keeps all its pages."""
        return self.window is None

    def pages_for(self, tokens: int) -> int:
        """Number of pages of a sequence of this many tokens, released ones included."""
        return -(-tokens // self.blocks.page_size)

    def pages_at_start(self, stored: int, tokens: int) -> int:
        """Pages that a sequence gets at admission, with ``stored`` of its ``tokens`` computed."""
        return self.pages_for(tokens if self.endless else stored)

    def first_page(self, position: int) -> int:
        """Number of the first page that a query at ``position`` reaches."""
        return first_page(position, self.window, self.blocks.page_size)

    def next_release_at(self, num_released: int) -> int:
        """Computed tokens from which a sequence needs one more page less."""
        if self.window is None:
            return sys.maxsize
        return (num_released + 1) * self.blocks.page_size + self.window - 1

    def num_to_recompute(self, tokens: int, unshared: int) -> int:
        """Tokens to compute again of a sequence that loses its ``unshared`` pages."""
        return min(tokens, unshared * self.blocks.page_size) if self.endless else tokens

    def keys(self, keys: list[bytes]) -> list[bytes]:
        """The keys of this group's pages, from the chain keys of their tokens."""
        return [group_key(key, self.index) for key in keys] if self.index else keys

    def cached(self, keys: list[bytes], start: int) -> list[int]:
        """The cached pages of this chain of keys, with -1 for those before number ``start``."""
        start = min(start, len(keys))
        return [-1] * start + self.blocks.match(self.keys(keys[start:]))

    def longest(self, keys: list[bytes]) -> int:
        """Number of leading pages of this chain that the group can serve at most."""
        return len(self.blocks.match(self.keys(keys))) if self.endless else len(keys)

    def last_missing(self, keys: list[bytes], position: int) -> int:
        """Number of the last page that a query at ``position`` reaches and that is not cached; -1
        for none.

        Args:
            keys: chain keys of the tokens before, at most ``longest`` of them.
            position: position of the query.
        """
        start = len(keys) if self.endless else self.first_page(position)
        find, index = self.blocks.find, self.index
        numbers = range(len(keys) - 1, start - 1, -1)
        return next((n for n in numbers if find(group_key(keys[n], index)) is None), -1)

    def append(self, sequence: Sequence, fresh: list[int]) -> None:
        """Add pages at the end of those of a running sequence."""
        pages = sequence.pages[self.index]
        self.table[sequence.slot, len(pages) : len(pages) + len(fresh)] = fresh
        pages += fresh

    def replace(self, sequence: Sequence, number: int, page: int) -> None:
        """Set one page of a running sequence."""
        sequence.pages[self.index][number] = page
        self.table[sequence.slot, number] = page

    def release_unreached(self, sequence: Sequence) -> None:
        """Release the pages that the next token of a sequence does not reach."""
        pages, start = sequence.pages[self.index], sequence.num_released[self.index]
        stop = min(self.first_page(sequence.num_computed), len(pages))
        if stop > start:
            self.blocks.release(pages[start:stop])
            pages[start:stop] = [-1] * (stop - start)
            sequence.num_released[self.index] = stop


@dataclasses.dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages that sequences hold in all page groups.

    Args:
        blocks: pages of the pool.
        groups: the page groups.
        states: states of the layers that have them in place of KV; None without such layers.
    """

    blocks: BlockManager
    groups: tuple[PageGroup, ...]
    states: StatePages | None = None

    def __iter__(self) -> Iterator[PageGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def start(self, sequence: Sequence, pages: list[list[int]]) -> None:
        """Set the pages of a sequence that has just got its slot, those it does not need as -1."""
        sequence.pages = [[] for _ in self.groups]
        sequence.num_released = [_leading_gaps(found) for found in pages]
        for group, found in zip(self.groups, pages, strict=True):
            group.append(sequence, found)
        self.set_capacity(sequence)
        self.set_next_release(sequence)

    def release_unreached(self, sequence: Sequence) -> None:
        """Release the pages that the next token of the sequence does not reach."""
        for group in self.groups:
            group.release_unreached(sequence)
        if self.states is not None:
            self.states.release_unreached(sequence)
        self.set_next_release(sequence)

    def extend(self, sequence: Sequence, stop: int) -> int:
        """Allocate pages for the tokens up to ``stop``; returns up to where there were enough."""
        if stop <= sequence.capacity:
            return stop
        number = -(-stop // self.blocks.page_size)
        short = [group for group in self.groups if len(sequence.pages[group.index]) < number]
        if short:
            count = number - len(sequence.pages[short[0].index])
            count = min(count, self.blocks.num_available // len(short))
            for group in short:
                fresh = self.blocks.allocate(count)
                assert fresh is not None
                group.append(sequence, fresh)
        if self.states is not None:
            in_pages = min(map(len, sequence.pages)) * self.blocks.page_size
            self.states.extend(sequence, min(stop, in_pages))
            self.set_next_release(sequence)
        self.set_capacity(sequence)
        return min(stop, sequence.capacity)

    def release(self, sequence: Sequence) -> None:
        """Release all pages of a sequence."""
        if self.states is not None:
            self.states.release(sequence)
        for pages, gone in zip(sequence.pages, sequence.num_released, strict=True):
            self.blocks.release(pages[gone:])
        sequence.pages, sequence.num_released = [], []

    def set_capacity(self, sequence: Sequence) -> None:
        """Set the tokens that the pages of a sequence can hold."""
        sequence.capacity = min(map(len, sequence.pages)) * self.blocks.page_size
        if self.states is not None:
            sequence.capacity = min(sequence.capacity, self.states.capacity(sequence))

    def longest(self, keys: list[bytes], longest: int, num_tokens: int) -> int:
        """How many leading pages of a chain can serve a sequence of ``num_tokens`` tokens.

        The token after them must find the pages that it reaches in every group. The last token is
        computed in any case.

        Args:
            keys: the chain.
            longest: most leading pages that every group can serve.
            num_tokens: number of tokens of the sequence.
        """
        end = longest
        while end > 0:
            position = min(end * self.blocks.page_size, num_tokens - 1)
            missing = max(group.last_missing(keys[:end], position) for group in self.groups)
            if missing < 0:
                break
            end = missing  # a token after it that reaches it cannot be the next one
        return end

    def set_next_release(self, sequence: Sequence) -> None:
        """Set the computed tokens from which it needs a page or a state less."""
        sequence.next_release_at = min(
            group.next_release_at(sequence.num_released[group.index]) for group in self.groups
        )
        if self.states is not None:
            of_states = self.states.next_release_at(sequence)
            sequence.next_release_at = min(sequence.next_release_at, of_states)


def make_groups(
    blocks: BlockManager,
    windows: tuple[int | None, ...],
    tables: Int[np.ndarray, "groups slots M"],
    states: StatePages | None = None,
) -> GroupPages:
    """The page groups with these windows and page tables."""
    groups = zip(windows, tables, strict=True)
    return GroupPages(
        blocks,
        tuple(PageGroup(i, window, blocks, table) for i, (window, table) in enumerate(groups)),
        states,
    )


def pages_numbered(sequence: Sequence, number: int) -> list[tuple[int, int]]:
    """(page group, page) of one page number, in the groups in which the sequence holds it."""
    return [(g, pages[number]) for g, pages in enumerate(sequence.pages) if pages[number] >= 0]


def _leading_gaps(pages: list[int]) -> int:
    return next((n for n, page in enumerate(pages) if page >= 0), len(pages))
