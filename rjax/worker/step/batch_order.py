"""The order of sequences in a batch: those with a shared prefix are adjacent."""

import numpy as np
from jaxtyping import Int

from rjax.batch.scheduled_sequence import ScheduledSequence


def by_shared_pages(
    batch: list[ScheduledSequence],
    tables: Int[np.ndarray, "slots pages"],
    *,
    page_size: int,
    kv_split: int,
) -> list[ScheduledSequence]:
    """Sort a batch so that, in every KV split, the sequences that hold the same pages are adjacent.

    Attention shares reads in whole splits of ``kv_split`` tokens. Two sequences that hold the same
    page at the end of a split hold the same pages before it. So only the pages at the ends of
    splits are compared, in order.

    Args:
        batch: scheduled sequences.
        tables: row s lists the pages of the sequence in slot s.
        page_size: tokens a page.
        kv_split: tokens of a KV split, a multiple of ``page_size``.
    """
    if len(batch) < 3:
        return batch  # in any order all are adjacent
    stops = np.fromiter([item.stop for item in batch], np.int32, len(batch))
    splits = int(np.partition(stops, -2)[-2]) // kv_split  # that two sequences may share
    if not splits:
        return batch
    slots = np.fromiter([item.sequence.slot for item in batch], np.int32, len(batch))
    columns = np.arange(1, splits + 1) * (kv_split // page_size) - 1
    pages = tables[slots[:, None], columns]
    pages[stops[:, None] < (columns + 1) * page_size] = -1
    ranked = np.sort(pages, axis=0)
    equal = (ranked[1:] == ranked[:-1]) & (ranked[1:] >= 0)
    pages = pages[:, equal.any(axis=0)]
    if not pages.size:
        return batch  # the first split is not shared, so none is
    # A later split groups sequences as the one before it does, or more finely. If it has as many
    # equal pairs, the groups are the same.
    count = equal.sum(axis=0)[: pages.shape[1]]
    pages = pages[:, np.append(count[1:] != count[:-1], True)]
    order = np.lexsort(pages.T[::-1])
    return [batch[i] for i in order.tolist()]
