"""Pages of layers with sliding windows: taken chunk by chunk, given back behind the window."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Int

from rjax.batch.page_groups import first_page
from rjax.batch.sequence import Sequence
from rjax.engine.block_manager import BlockManager


@dataclasses.dataclass(frozen=True, slots=True)
class WindowPages:
    """The pages that sequences hold in the page groups with windows.

    A sequence has the same page numbers in all of these groups, up to its last computed token. It
    holds those that its next token reaches, and those of the tokens that a step computes at once.

    Args:
        blocks: pages of the pool, which serves all page groups.
        windows: window of each of these page groups, in tokens.
        first_group: number of the first of them among all page groups.
        tables: their page tables; row s is that of the sequence in slot s.
    """

    blocks: BlockManager
    windows: tuple[int, ...]
    first_group: int
    tables: Int[np.ndarray, "W slots M"]

    def __len__(self) -> int:
        return len(self.windows)

    def groups(self, sequence: Sequence) -> Iterator[tuple[int, list[int]]]:
        """(number among all page groups, pages of the sequence) of each group."""
        return enumerate(sequence.window_pages, self.first_group)

    def start(self, sequence: Sequence, pages: list[list[int]]) -> None:
        """Set the pages of a sequence that has just got its slot, those it does not need as -1."""
        sequence.window_pages = pages
        sequence.num_given_back = [_leading_gaps(found) for found in pages]
        for table, found in zip(self.tables, pages, strict=True):
            table[sequence.slot, : len(found)] = found
        self._set_next(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Release the pages that the next token of the sequence does not reach."""
        position, S = sequence.num_computed, self.blocks.page_size
        for i, (window, pages) in enumerate(zip(self.windows, sequence.window_pages, strict=True)):
            start = sequence.num_given_back[i]
            stop = min(first_page(position, window, S), len(pages))
            if stop > start:
                self.blocks.release(pages[start:stop])
                pages[start:stop] = [-1] * (stop - start)
                sequence.num_given_back[i] = stop
        self._set_next(sequence)

    def extend(self, sequence: Sequence, stop: int) -> int:
        """Allocate pages for the tokens up to ``stop``; returns up to where there were enough."""
        S, held = self.blocks.page_size, len(sequence.window_pages[0])
        count = min(-(-stop // S) - held, self.blocks.num_available // len(self))
        for i in range(len(self) if count > 0 else 0):
            fresh = self.blocks.allocate(count)
            assert fresh is not None
            self.append(sequence, i, fresh)
        return min(stop, len(sequence.window_pages[0]) * S)

    def append(self, sequence: Sequence, index: int, fresh: list[int]) -> None:
        """Add pages at the end of one of the groups."""
        pages = sequence.window_pages[index]
        self.tables[index, sequence.slot, len(pages) : len(pages) + len(fresh)] = fresh
        pages += fresh

    def release(self, sequence: Sequence) -> None:
        """Release all pages of a sequence."""
        for pages, gone in zip(sequence.window_pages, sequence.num_given_back, strict=True):
            self.blocks.release(pages[gone:])
        sequence.window_pages, sequence.num_given_back = [], []

    def longest(
        self, num_pages: int, num_tokens: int, available: Callable[[int, int], bool]
    ) -> int:
        """How many leading pages of a sequence can serve it, of ``num_pages`` at most.

        The token after them must find the pages that it reaches in every group.

        Args:
            num_pages: number of leading pages that the other page groups have.
            num_tokens: number of tokens of the sequence, whose last one is computed in any case.
            available: maps (index of the group, page number) to whether the page is there.
        """
        S, end = self.blocks.page_size, num_pages
        while end > 0:
            position = min(end * S, num_tokens - 1)
            starts = [first_page(position, window, S) for window in self.windows]
            missing = next(
                (
                    number
                    for number in range(end - 1, min(starts) - 1, -1)
                    for i, start in enumerate(starts)
                    if number >= start and not available(i, number)
                ),
                None,
            )
            if missing is None:
                return end
            end = missing  # a token after it that reaches it cannot be the next one
        return 0

    def _set_next(self, sequence: Sequence) -> None:
        S = self.blocks.page_size
        sequence.gives_back_at = min(
            (gone + 1) * S + window - 1
            for gone, window in zip(sequence.num_given_back, self.windows, strict=True)
        )


def _leading_gaps(pages: list[int]) -> int:
    return next((n for n, page in enumerate(pages) if page >= 0), len(pages))
