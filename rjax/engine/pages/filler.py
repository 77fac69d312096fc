"""Fills the fresh pages of a sequence that starts."""

import dataclasses
from collections.abc import Sequence

from rjax.batch.page_operations import PageOperations
from rjax.engine.pages.block_manager import BlockManager


@dataclasses.dataclass(frozen=True, slots=True)
class PageFiller:
    """Hands out fresh pages, and adds the operations that fill them.

    Attributes:
        blocks: pages of the pool.
        operations: page operations of the next step.
        fresh: allocated pages that are not handed out yet.
    """

    blocks: BlockManager
    operations: PageOperations
    fresh: list[int]

    def extended(
        self, pages: Sequence[int], slots: Sequence[int], *, copies: bool, count: int
    ) -> list[int]:
        """The pages of a sequence in one page group, followed by fresh ones.

        Args:
            pages: pages on which the sequence has a reference, or -1.
            slots: host slots that fill the first fresh pages.
            copies: whether the first fresh page copies the last of ``pages``, and replaces it.
            count: number of fresh pages.
        """
        held, fresh = list(pages), self.fresh[:count]
        del self.fresh[:count]
        if copies:
            self.operations.copy(held[-1], fresh[0])
            self.blocks.release([held.pop()])
        if slots:
            self.operations.swap_in(list(slots), fresh[: len(slots)])
        return held + fresh
