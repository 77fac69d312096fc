"""The order of sequences in a batch: those with a common beginning side by side."""

import numpy as np
from jaxtyping import Int

from rjax.batch.scheduled_sequence import ScheduledSequence


def by_shared_pages(
    batch: list[ScheduledSequence],
    tables: Int[np.ndarray, "slots pages"],
    *,
    page_size: int,
    split_tokens: int,
) -> list[ScheduledSequence]:
    """Sort a batch so that, at every cut, the sequences that hold the same pages are adjacent.

    Reads are shared in whole runs of ``split_tokens``, and two sequences that hold the same page at
    the end of a run hold the same pages before it. So the pages at the ends of runs, in order, are
    all that need be compared, as far as any two sequences have one in common.
    """
    if len(batch) < 3:
        return batch  # any order has them side by side
    stops = np.fromiter([item.stop for item in batch], np.int32, len(batch))
    runs = int(np.partition(stops, -2)[-2]) // split_tokens  # that two sequences may share
    if not runs:
        return batch
    slots = np.fromiter([item.sequence.slot for item in batch], np.int32, len(batch))
    columns = np.arange(1, runs + 1) * (split_tokens // page_size) - 1
    pages = tables[slots[:, None], columns]
    pages[stops[:, None] < (columns + 1) * page_size] = -1
    ranked = np.sort(pages, axis=0)
    twins = (ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0)
    pages = pages[:, twins.any(axis=0)]
    if not pages.size:
        return batch  # nothing is shared from the start, so nothing is shared at all
    # A later run has the same twins or fewer, so where it has as many it groups alike.
    count = twins.sum(axis=0)[: pages.shape[1]]
    pages = pages[:, np.append(count[1:] != count[:-1], True)]
    order = np.lexsort(pages.T[::-1])
    return [batch[i] for i in order.tolist()]
