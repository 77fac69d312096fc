"""The order of sequences in a batch: those with a common beginning side by side."""

import numpy as np

from rjax.engine.block_manager import BlockManager
from rjax.engine.scheduler import ScheduledSequence


def by_shared_pages(
    batch: list[ScheduledSequence], blocks: BlockManager
) -> list[ScheduledSequence]:
    """Sort a batch so that, at every depth of the prefix tree, a shared page's owners are adjacent.

    Pages held by one owner alone are nobody's reason to be adjacent, so only the leading columns of
    the page tables that hold shared pages are compared.
    """
    columns = []
    depth = 0
    while True:
        column = [
            item.sequence.pages[depth] if depth < len(item.sequence.pages) else -1 for item in batch
        ]
        if not any(page >= 0 and blocks.references(page) > 1 for page in column):
            break
        columns.append(column)
        depth += 1
    if not columns:
        return batch
    order = np.lexsort(np.asarray(columns[::-1]))
    return [batch[i] for i in order]
