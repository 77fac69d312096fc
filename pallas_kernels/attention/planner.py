"""The host planner: page tables and lengths in, attention work lists of fixed shapes out.

It splits the KV of the batch at multiples of the KV split size, finds neighbouring sequences that
share the pages of a split (a shared prefix), and makes one item for all of them where that pays.
``joining`` then coalesces the splits. Everything is NumPy, O(sequences * splits), once a step.
"""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from pallas_kernels.attention.joining import (
    Joining,
    Spans,
    coalesce_multi_row,
    coalesce_single_row,
)
from pallas_kernels.attention.work_list import AttentionPlan, WorkList


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Time of attention items, in any one unit, as measured on the device in use.

    A narrow item (single row) of C tokens costs ``narrow_item + narrow_token * C``. A wide item
    (multi-row) costs ``wide_item + wide_token * C``, independent of its live rows, because a tile
    of rows is computed whole.
    """

    narrow_item: float
    narrow_token: float
    wide_item: float
    wide_token: float

    def sharing_pays(
        self, rows: Int[np.ndarray, " X"], tile_rows: int, tokens: int
    ) -> Bool[np.ndarray, " X"]:
        """Whether reading ``tokens`` shared tokens once for ``rows`` rows beats one item a row."""
        shared = -(-rows // tile_rows) * (self.wide_item + self.wide_token * tokens)
        return shared < rows * (self.narrow_item + self.narrow_token * tokens)


type Sharing = Literal["on", "off"] | CostModel
"""Which runs of pages that several sequences hold are read once: all, none, or those that pay."""


MOST_RESULTS = 32
"""Partial results of a row at most, in steps for long sequences."""


def cut_tokens(max_context: int, unit: int, joining: Joining | None) -> int:
    """The KV split size for sequences of up to ``max_context`` tokens, a multiple of ``unit``.

    It is ``unit`` where splits are coalesced. Otherwise it is large enough that a row has at most
    ``MOST_RESULTS`` partial results.
    """
    return unit if joining is not None else unit * math.ceil(max_context / unit / MOST_RESULTS)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanShape:
    """The fixed shapes of the plans of one compiled step.

    Attributes:
        rows: T, packed query rows.
        seqs: B, rows of the page table.
        max_context: most tokens of one sequence.
        tile_rows: rows of a multi-row item at most.
        split_tokens: the KV split size: items are split at multiples of this many tokens of the
            sequence, so that a row's arithmetic does not depend on the rows that share with it.
        joining: how splits are coalesced, or None for not at all. A row's arithmetic then depends
            on the batch, within rounding, and a row has at most ``MOST_RESULTS`` items: a batch
            that needs more is split at the next power-of-two multiple of ``split_tokens``.
    """

    rows: int
    seqs: int
    max_context: int
    tile_rows: int
    split_tokens: int
    joining: Joining | None = None

    @property
    def cuts(self) -> int:
        """KV splits of the longest sequence."""
        return math.ceil(self.max_context / self.split_tokens)

    @property
    def results(self) -> int:
        """Capacity for the partial results of one row."""
        return self.cuts if self.joining is None else min(self.cuts, MOST_RESULTS)

    @property
    def item_tokens(self) -> int:
        """KV tokens of an item at most."""
        return self.split_tokens * (1 if self.joining is None else self.cuts)

    @property
    def narrow_capacity(self) -> int:
        """Capacity for single-row items."""
        return self.results * min(self.seqs, self.rows)

    @property
    def wide_capacity(self) -> int:
        """Capacity for multi-row items: at each of ``results`` splits, the rows in full tiles and
        one partial tile for each span of two rows or more."""
        spans = min(self.seqs, self.rows // 2)
        return max(1, self.results * (math.ceil(self.rows / self.tile_rows) + spans))

    @property
    def merge_capacity(self) -> int:
        """Capacity for the partial results of all rows together."""
        return self.results * self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class PlanStats:
    """What a plan reads.

    Attributes:
        kv_tokens_read: tokens of KV that the items read, each item once.
        kv_tokens_unshared: the same if every sequence read its own.
        shared_groups: groups of sequences that read a run of pages together, over all splits.
    """

    kv_tokens_read: int
    kv_tokens_unshared: int
    shared_groups: int


def plan_attention(
    page_table: Int[np.ndarray, "A M"],
    query_start: Int[np.ndarray, " A1"],
    context_len: Int[np.ndarray, " A"],
    *,
    page_size: int,
    shape: PlanShape,
    sharing: Sharing,
) -> tuple[AttentionPlan, PlanStats]:
    """Plan one step's attention for A <= B live sequences packed in batch order.

    Args:
        page_table: page ids; two sequences hold the same id at the same place only if all their
            tokens up to the end of that page are equal (a prefix tree guarantees that).
        query_start: first packed row of each sequence, and the end; its rows are the last
            ``query_start[b + 1] - query_start[b]`` >= 1 tokens of its context.
        context_len: tokens of each sequence, this step's included.
        page_size: S.
        shape: of the compiled step; arrays are padded to it.
        sharing: "on" reads every split shared by neighbours once, "off" never, a cost model where
            it pays. Only whole splits are shared.

    Sequences that share must be neighbours: order the batch by page table.

    Returns:
        The plan (NumPy leaves) and what it reads.
    """
    tokens = shape.split_tokens
    assert tokens % page_size == 0 and shape.seqs >= context_len.size
    assert query_start[-1] <= shape.rows
    while True:
        single, many, stats = _spans(
            page_table, query_start, context_len, page_size, shape.tile_rows, tokens, sharing
        )
        if shape.joining is not None:
            many = coalesce_multi_row(many, tokens, shape.tile_rows, shape.joining)
        tiles = many.tiled(shape.tile_rows)
        if shape.joining is not None:
            before = shape.joining.lane_loads(tiles.kv_stop - tiles.kv_start, shape.tile_rows)
            single = coalesce_single_row(
                single, tokens, shape.narrow_capacity, shape.joining, before
            )
        if (
            single.row_count.size <= shape.narrow_capacity
            and tiles.row_count.size <= shape.wide_capacity
            and single.row_count.size + many.row_count.sum() <= shape.merge_capacity
        ):
            break
        # ``results`` splits always fit.
        assert shape.joining is not None and tokens * shape.results < shape.max_context
        tokens *= 2
    single_row = _work_list(single, shape.narrow_capacity, 1, shape.item_tokens)
    multi_row = _work_list(tiles, shape.wide_capacity, shape.tile_rows, shape.item_tokens)
    indptr, slots = _merge((single_row, multi_row), shape)
    return AttentionPlan((single_row, multi_row), indptr, slots), stats


def _spans(
    page_table: Int[np.ndarray, "A M"],
    query_start: Int[np.ndarray, " A1"],
    context_len: Int[np.ndarray, " A"],
    page_size: int,
    tile_rows: int,
    tokens: int,
    sharing: Sharing,
) -> tuple[Spans, Spans, PlanStats]:
    """Split the batch at multiples of ``tokens``: (single-row spans, multi-row spans, stats)."""
    A, C = context_len.size, tokens
    splits = -(-int(context_len.max(initial=0)) // C)
    starts = np.arange(splits) * C
    active = context_len > starts[:, None]
    # A split is shared with the left neighbour if both have all of it and the same last page.
    shared = np.zeros((splits, A), bool)
    if sharing != "off" and A > 1 and splits:
        full = context_len >= starts[:, None] + C
        last = np.minimum((starts + C) // page_size - 1, page_table.shape[1] - 1)
        ids = page_table[:, last].T
        shared[:, 1:] = full[:, 1:] & full[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    if isinstance(sharing, CostModel):
        shared = _unshare_unprofitable(shared, query_start, sharing, tile_rows, C)
    split, first = np.nonzero(active & ~shared)
    # Flat index of a span's first sequence; the span ends at the next break or at the split's end.
    breaks = np.append(np.flatnonzero((~shared | ~active).ravel()), splits * A)
    flat = split * A + first
    end = np.minimum(breaks[np.searchsorted(breaks, flat, side="right")], (split + 1) * A)
    stop = end - split * A
    row_begin, row_end = query_start[first], query_start[stop]
    # Rows of a prompt chunk before the split do not see it.
    skip = np.where(
        stop - first == 1,
        np.clip(starts[split] - (context_len[first] - (row_end - row_begin)), 0, None),
        0,
    )
    row_begin = row_begin + skip
    spans = Spans(
        row_begin=row_begin,
        row_count=row_end - row_begin,
        table_row=first,
        kv_start=starts[split],
        kv_stop=np.where(
            stop - first > 1, starts[split] + C, np.minimum(starts[split] + C, context_len[first])
        ),
    )
    sizes = (stop - first) * (spans.kv_stop - spans.kv_start)
    stats = PlanStats(
        kv_tokens_read=int((spans.kv_stop - spans.kv_start).sum()),
        kv_tokens_unshared=int(sizes.sum()),
        shared_groups=int((stop - first > 1).sum()),
    )
    return spans.select(spans.row_count == 1), spans.select(spans.row_count > 1), stats


def _unshare_unprofitable(
    shared: Bool[np.ndarray, "J A"],
    query_start: Int[np.ndarray, " A1"],
    model: CostModel,
    tile_rows: int,
    tokens: int,
) -> Bool[np.ndarray, "J A"]:
    """``shared`` without the groups whose shared read costs more than separate reads."""
    A = shared.shape[1]
    first = np.flatnonzero(~shared.ravel())
    ends = np.append(first[1:], shared.size)
    rows = query_start[(ends - 1) % A + 1] - query_start[first % A]
    pays = model.sharing_pays(rows, tile_rows, tokens)
    return shared & np.repeat(pays, ends - first).reshape(shared.shape)


def _work_list(spans: Spans, capacity: int, tile_rows: int, tile_tokens: int) -> WorkList:
    items = spans.row_begin.size
    assert items <= capacity, (items, capacity)

    return WorkList(
        row_start=_padded(spans.row_begin, capacity),
        row_count=_padded(spans.row_count, capacity),
        table_row=_padded(spans.table_row, capacity),
        kv_start=_padded(spans.kv_start, capacity),
        kv_stop=_padded(spans.kv_stop, capacity),
        num_items=np.asarray(items, np.int32),
        tile_rows=tile_rows,
        tile_tokens=tile_tokens,
    )


def _padded(field: Int[np.ndarray, " X"], capacity: int) -> Int[np.ndarray, " C"]:
    # A module function: tests compile the type checks of a nested one again at each call.
    out = np.zeros(capacity, np.int32)
    out[: field.size] = field
    return out


def _merge(
    lists: tuple[WorkList, ...], shape: PlanShape
) -> tuple[Int[np.ndarray, " T1"], Int[np.ndarray, " X"]]:
    """(indptr, slots): the partial results of each row, in order of the tokens that they cover."""
    live = [slice(int(items.num_items)) for items in lists]
    starts = [np.asarray(items.kv_start)[n] for items, n in zip(lists, live, strict=True)]
    # The items of a row start at different tokens, so a table of slots by row and start token is
    # already in order.
    columns = np.unique(np.concatenate(starts))
    table = np.full((shape.rows, columns.size), -1, np.int32)
    base = 0
    for items, n, start in zip(lists, live, starts, strict=True):
        count = np.asarray(items.row_count)[n]
        item = np.repeat(np.arange(count.size, dtype=np.int32), count)
        offset = np.arange(item.size, dtype=np.int32) - (count.cumsum() - count)[item]
        row = np.asarray(items.row_start)[item] + offset
        table[row, np.searchsorted(columns, start)[item]] = base + item * items.tile_rows + offset
        base += items.capacity * items.tile_rows
    found = table >= 0
    indptr = np.zeros(shape.rows + 1, np.int32)
    found.sum(1).cumsum(out=indptr[1:], dtype=np.int32)
    merged = np.zeros(shape.merge_capacity, np.int32)
    slots = table[found]
    merged[: slots.size] = slots
    return indptr, merged
