"""The host planner: page tables, lengths and sharing in, a work list with fixed shapes out."""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

from pallas_kernels.attention.joining import Joining, Spans, join_many, join_single
from pallas_kernels.attention.work_list import AttentionPlan, WorkList


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Time of attention items, in arbitrary but equal units, as measured on the device in use.

    A narrow item (one row) of C tokens costs ``narrow_item + narrow_token * C``; a wide one
    ``wide_item + wide_token * C``, whatever its live rows, because a tile is computed whole.
    """

    narrow_item: float
    narrow_token: float
    wide_item: float
    wide_token: float

    def sharing_pays(
        self, rows: Int[np.ndarray, " X"], tile_rows: int, tokens: int
    ) -> Bool[np.ndarray, " X"]:
        """Whether reading ``tokens`` shared tokens once for ``rows`` rows beats one item a row."""
        wide = -(-rows // tile_rows) * (self.wide_item + self.wide_token * tokens)
        return wide < rows * (self.narrow_item + self.narrow_token * tokens)


type Sharing = Literal["on", "off"] | CostModel
"""Which runs of pages that several sequences hold are read once: all, none, or those that pay."""


MOST_RESULTS = 32
"""Partial results of a row that steps for long sequences have room for."""


def cut_tokens(max_context: int, unit: int, joining: Joining | None) -> int:
    """Where plans for sequences of up to ``max_context`` tokens are cut: at multiples of ``unit``
    tokens, or, where cuts are not joined, of so many units that a row has few results to merge."""
    return unit if joining is not None else unit * math.ceil(max_context / unit / MOST_RESULTS)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanShape:
    """The fixed shapes of the plans of one compiled step.

    Attributes:
        rows: T, packed query rows.
        seqs: B, rows of the page table.
        max_context: most tokens of one sequence.
        tile_rows: rows of a wide item.
        split_tokens: items are cut at multiples of this many tokens of the sequence, wherever the
            batch stands, so that a row's arithmetic does not depend on who shares with it.
        joining: None, or join cuts of an item. Then a row's arithmetic does depend on the batch it
            stands in, within rounding, and there is room for ``MOST_RESULTS`` items a row at most;
            batches that need more are cut at twice ``split_tokens``, or twice that, ...
    """

    rows: int
    seqs: int
    max_context: int
    tile_rows: int
    split_tokens: int
    joining: Joining | None = None

    @property
    def cuts(self) -> int:
        """Runs of ``split_tokens`` in the longest sequence."""
        return math.ceil(self.max_context / self.split_tokens)

    @property
    def results(self) -> int:
        """Items that there is room for at one row."""
        return self.cuts if self.joining is None else min(self.cuts, MOST_RESULTS)

    @property
    def item_tokens(self) -> int:
        """Tokens of an item at most."""
        return self.split_tokens * (1 if self.joining is None else self.cuts)

    @property
    def narrow_capacity(self) -> int:
        """One-row items that there is room for."""
        return self.results * min(self.seqs, self.rows)

    @property
    def wide_capacity(self) -> int:
        """Many-row items that there is room for: at each of ``results`` cuts, the rows in whole
        tiles and one broken tile for each span of two rows or more."""
        spans = min(self.seqs, self.rows // 2)
        return max(1, self.results * (math.ceil(self.rows / self.tile_rows) + spans))

    @property
    def merge_capacity(self) -> int:
        """Partial results of all rows together that there is room for."""
        return self.results * self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class PlanStats:
    """What a plan reads.

    Attributes:
        kv_tokens_read: tokens of KV that the items read, each item once.
        kv_tokens_unshared: the same if every sequence read its own.
        shared_groups: groups of sequences that read a run of pages together, over all cuts.
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
            tokens up to the end of that page are equal (what a prefix tree guarantees).
        query_start: first packed row of each sequence, and the end; its rows are the last
            ``query_start[b + 1] - query_start[b]`` >= 1 tokens of its context.
        context_len: tokens of each sequence, this step's included.
        page_size: S.
        shape: of the compiled step; arrays are padded to it.
        sharing: "on" reads every run shared by neighbours once, "off" never, a cost model where it
            pays. Only whole runs of ``split_tokens`` are shared.

    Sequences that share must stand side by side: order the batch by page table. The cost is
    O(A * cuts) NumPy work.

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
            many = join_many(many, tokens, shape.tile_rows, shape.joining)
        tiles = many.tiled(shape.tile_rows)
        if shape.joining is not None:
            before = shape.joining.taken(tiles.kv_stop - tiles.kv_start, shape.tile_rows)
            single = join_single(single, tokens, shape.narrow_capacity, shape.joining, before)
        if (
            single.row_count.size <= shape.narrow_capacity
            and tiles.row_count.size <= shape.wide_capacity
            and single.row_count.size + many.row_count.sum() <= shape.merge_capacity
        ):
            break
        # At ``results`` cuts everything has room.
        assert shape.joining is not None and tokens * shape.results < shape.max_context
        tokens *= 2
    narrow = _work_list(single, shape.narrow_capacity, 1, shape.item_tokens)
    wide = _work_list(tiles, shape.wide_capacity, shape.tile_rows, shape.item_tokens)
    indptr, slots = _merge((narrow, wide), shape)
    return AttentionPlan((narrow, wide), indptr, slots), stats


def _spans(
    page_table: Int[np.ndarray, "A M"],
    query_start: Int[np.ndarray, " A1"],
    context_len: Int[np.ndarray, " A"],
    page_size: int,
    tile_rows: int,
    tokens: int,
    sharing: Sharing,
) -> tuple[Spans, Spans, PlanStats]:
    """The batch cut at multiples of ``tokens``: spans of one row and of several, and what they
    read."""
    A, C = context_len.size, tokens
    cuts = -(-int(context_len.max(initial=0)) // C)
    starts = np.arange(cuts) * C
    active = context_len > starts[:, None]
    # A run is shared with the left neighbour when both hold all of it in the same last page.
    joined = np.zeros((cuts, A), bool)
    if sharing != "off" and A > 1 and cuts:
        full = context_len >= starts[:, None] + C
        last = np.minimum((starts + C) // page_size - 1, page_table.shape[1] - 1)
        ids = page_table[:, last].T
        joined[:, 1:] = full[:, 1:] & full[:, :-1] & (ids[:, 1:] == ids[:, :-1])
    if isinstance(sharing, CostModel):
        joined = _keep_paying(joined, query_start, sharing, tile_rows, C)
    cut, first = np.nonzero(active & ~joined)
    # Flat index of a span's first sequence; the span runs to the next break or the end of the cut.
    breaks = np.append(np.flatnonzero((~joined | ~active).ravel()), cuts * A)
    flat = cut * A + first
    end = np.minimum(breaks[np.searchsorted(breaks, flat, side="right")], (cut + 1) * A)
    stop = end - cut * A
    row_begin, row_end = query_start[first], query_start[stop]
    # Rows of a prompt chunk that lie before the cut see nothing of it.
    skip = np.where(
        stop - first == 1,
        np.clip(starts[cut] - (context_len[first] - (row_end - row_begin)), 0, None),
        0,
    )
    row_begin = row_begin + skip
    spans = Spans(
        row_begin=row_begin,
        row_count=row_end - row_begin,
        table_row=first,
        kv_start=starts[cut],
        kv_stop=np.where(
            stop - first > 1, starts[cut] + C, np.minimum(starts[cut] + C, context_len[first])
        ),
    )
    sizes = (stop - first) * (spans.kv_stop - spans.kv_start)
    stats = PlanStats(
        kv_tokens_read=int((spans.kv_stop - spans.kv_start).sum()),
        kv_tokens_unshared=int(sizes.sum()),
        shared_groups=int((stop - first > 1).sum()),
    )
    return spans.select(spans.row_count == 1), spans.select(spans.row_count > 1), stats


def _keep_paying(
    joined: Bool[np.ndarray, "J A"],
    query_start: Int[np.ndarray, " A1"],
    model: CostModel,
    tile_rows: int,
    tokens: int,
) -> Bool[np.ndarray, "J A"]:
    """Break up the groups whose shared read would cost more than the separate ones."""
    A = joined.shape[1]
    heads = np.flatnonzero(~joined.ravel())
    ends = np.append(heads[1:], joined.size)
    rows = query_start[(ends - 1) % A + 1] - query_start[heads % A]
    pays = model.sharing_pays(rows, tile_rows, tokens)
    return joined & np.repeat(pays, ends - heads).reshape(joined.shape)


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
    # Of the module: inside the function a test run would make its check anew at each step.
    out = np.zeros(capacity, np.int32)
    out[: field.size] = field
    return out


def _merge(
    lists: tuple[WorkList, ...], shape: PlanShape
) -> tuple[Int[np.ndarray, " T1"], Int[np.ndarray, " X"]]:
    """Partial results of each row, in order of the tokens they cover."""
    live = [slice(int(items.num_items)) for items in lists]
    starts = [np.asarray(items.kv_start)[n] for items, n in zip(lists, live, strict=True)]
    # No two items of a row begin at one token: a table of slots by row and start is sorted by
    # itself.
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
