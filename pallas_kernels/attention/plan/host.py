"""The host planner: page tables and lengths in, attention work lists of fixed shapes out.

It splits the KV of the batch at multiples of the KV split size, finds neighbouring sequences that
share the pages of a split (a shared prefix), and makes one item for all of them where that pays.
``splits`` then coalesces the splits. Everything is NumPy, O(sequences * splits).
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from rjax.pallas_kernels.attention.plan.splits import (
    Spans,
    SplitPolicy,
    coalesce_multi_row,
    coalesce_single_row,
)
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, WorkList


@dataclasses.dataclass(frozen=True, slots=True)
class CostModel:
    """Time of attention items, in an arbitrary unit, measured on the device in use.

    A single-row item of C tokens costs ``single_row_item + single_row_token * C``. A multi-row item
    costs ``multi_row_item + multi_row_token * C``, independent of its live rows, because a whole
    tile of rows is computed.
    """

    single_row_item: float
    single_row_token: float
    multi_row_item: float
    multi_row_token: float

    def sharing_pays(
        self, rows: Int[np.ndarray, " X"], tile_rows: int, tokens: int
    ) -> Bool[np.ndarray, " X"]:
        """Whether reading ``tokens`` shared tokens once for ``rows`` rows beats one item a row."""
        shared = -(-rows // tile_rows) * (self.multi_row_item + self.multi_row_token * tokens)
        return shared < rows * (self.single_row_item + self.single_row_token * tokens)


type Sharing = Literal["on", "off"] | CostModel
"""Which runs of pages that several sequences hold are read once: all, none, or those that pay."""


MAX_PARTIAL_RESULTS = 32
"""Most partial results of a row, in steps for long sequences."""


def choose_kv_split_size(max_context: int, smallest: int, split_policy: SplitPolicy | None) -> int:
    """The KV split size for sequences of up to ``max_context`` tokens, a multiple of ``smallest``.

    It is ``smallest`` if splits are coalesced. Otherwise it is large enough that a row has at most
    ``MAX_PARTIAL_RESULTS`` partial results.
    """
    if split_policy is not None:
        return smallest
    return smallest * math.ceil(max_context / smallest / MAX_PARTIAL_RESULTS)


@dataclasses.dataclass(frozen=True, slots=True)
class PlanShape:
    """The fixed shapes of the plans of one compiled step.

    Attributes:
        rows: T, packed query rows.
        seqs: B, rows of the page table.
        max_context: most tokens of one sequence.
        tile_rows: most rows of a multi-row item.
        kv_split_size: items are split at multiples of this many KV tokens of the sequence, so that
            a row's arithmetic does not depend on the rows that share with it.
        split_policy: how splits are coalesced, or None to keep every split. With a policy a row's
            arithmetic depends on the batch, within rounding, and a row has at most
            ``MAX_PARTIAL_RESULTS`` items: a batch that needs more is split at the next power-of-two
            multiple of ``kv_split_size``.
        window: sliding window of the layers that the plan serves, in tokens; None for full
            attention. No item reads a split that is outside the windows of all its rows.
        prefix_split_size: tokens of a split of a prefix, in the device planner only. A sequence is
            split at multiples of it up to the end of its prefix, and at multiples of
            ``kv_split_size`` counted from there. None for sequences without prefixes.
    """

    rows: int
    seqs: int
    max_context: int
    tile_rows: int
    kv_split_size: int
    split_policy: SplitPolicy | None = None
    window: int | None = None
    prefix_split_size: int | None = None

    @property
    def num_splits(self) -> int:
        """KV splits of the longest sequence."""
        at_end_of_prefix = self.prefix_split_size is not None
        return math.ceil(self.max_context / self.kv_split_size) + at_end_of_prefix

    @property
    def max_partials(self) -> int:
        """Capacity for the partial results of one row."""
        if self.prefix_split_size is not None:
            return self.num_splits
        splits = self.splits_of_row(self.kv_split_size)
        return splits if self.split_policy is None else min(splits, MAX_PARTIAL_RESULTS)

    def splits_of_row(self, tokens: int) -> int:
        """Most KV splits of one row, if a split has ``tokens`` tokens."""
        splits = math.ceil(self.max_context / tokens)
        return splits if self.window is None else min(splits, (self.window - 2) // tokens + 2)

    @property
    def max_item_tokens(self) -> int:
        """Most KV tokens of an item."""
        if self.split_policy is not None:
            return self.kv_split_size * self.num_splits
        return max(self.kv_split_size, self.prefix_split_size or 0)

    @property
    def single_row_capacity(self) -> int:
        """Capacity for single-row items."""
        return self.max_partials * min(self.seqs, self.rows)

    @property
    def multi_row_capacity(self) -> int:
        """Capacity for multi-row items: at each of ``max_partials`` splits, the rows in full tiles
        and one partial tile for each span of two rows or more. The rows of a chunk see one split
        more than each of them for every split that the chunk fills, and one at its edge."""
        spans = min(self.seqs, self.rows // 2)
        found = self.max_partials * (math.ceil(self.rows / self.tile_rows) + spans)
        if self.window is not None:
            found += min(self.rows // self.kv_split_size, self.num_splits) + spans
        return max(1, found)

    @property
    def merge_capacity(self) -> int:
        """Capacity for the partial results of all rows together."""
        return self.max_partials * self.rows


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
    page_table: Int[np.ndarray, "A M"] | Int[np.ndarray, "W X M"],
    query_start: Int[np.ndarray, " A1"],
    context_len: Int[np.ndarray, " A"],
    *,
    page_size: int,
    shape: PlanShape,
    sharing: Sharing,
    table_rows: Int[np.ndarray, " A"] | None = None,
) -> tuple[AttentionPlan, PlanStats]:
    """Plan one step's attention for A <= B live sequences packed in batch order.

    Args:
        page_table: page ids; two sequences hold the same id at the same place only if all their
            tokens up to the end of that page are equal (a prefix tree guarantees that). With
            several tables, sequences share a split only if they do in all of them.
        query_start: first packed row of each sequence, and the end; its rows are the last
            ``query_start[b + 1] - query_start[b]`` >= 1 tokens of its context.
        context_len: tokens of each sequence, this step's included.
        page_size: S.
        shape: the fixed shapes of the compiled step; arrays are padded to them.
        sharing: "on" reads every split shared by neighbours once, "off" never, a cost model where
            it pays. Only whole splits are shared.
        table_rows: the row of the page table of each sequence; by default its number.

    Sequences that share must be neighbours: order the batch by page table.

    With a window, a page that no row of a sequence reaches may have any id in its table. A split is
    shared only if all rows see it; the table of the sequence that reaches back furthest serves all.

    Returns:
        The plan (NumPy leaves) and what it reads.
    """
    tokens = shape.kv_split_size
    assert tokens % page_size == 0 and shape.seqs >= context_len.size
    assert query_start[-1] <= shape.rows and shape.prefix_split_size is None
    tables = page_table if page_table.ndim == 3 else page_table[None]
    if table_rows is None:
        table_rows = np.arange(context_len.size)
    batch = _Batch(tables, table_rows, query_start, context_len, page_size, shape.window)
    while True:
        single, many, stats = _spans(batch, shape.tile_rows, tokens, sharing)
        if shape.split_policy is not None:
            many = coalesce_multi_row(many, tokens, shape.tile_rows, shape.split_policy)
        tiles = many.tiled(shape.tile_rows)
        if shape.split_policy is not None:
            before = shape.split_policy.lane_loads(tiles.kv_stop - tiles.kv_start, shape.tile_rows)
            single = coalesce_single_row(
                single, tokens, shape.single_row_capacity, shape.split_policy, before
            )
        if (
            single.row_count.size <= shape.single_row_capacity
            and tiles.row_count.size <= shape.multi_row_capacity
            and single.row_count.size + many.row_count.sum() <= shape.merge_capacity
        ):
            break
        # ``max_partials`` splits always fit.
        assert shape.split_policy is not None
        assert shape.splits_of_row(tokens) > shape.max_partials
        tokens *= 2
    single_row = _work_list(single, shape.single_row_capacity, 1, shape.max_item_tokens)
    multi_row = _work_list(tiles, shape.multi_row_capacity, shape.tile_rows, shape.max_item_tokens)
    indptr, slots = _merge((single_row, multi_row), shape)
    return AttentionPlan((single_row, multi_row), indptr, slots), stats


class _Batch(NamedTuple):
    """Arguments of ``plan_attention``."""

    page_tables: Int[np.ndarray, "W X M"]
    table_rows: Int[np.ndarray, " A"]
    query_start: Int[np.ndarray, " A1"]
    context_len: Int[np.ndarray, " A"]
    page_size: int
    window: int | None


def _spans(
    batch: _Batch, tile_rows: int, tokens: int, sharing: Sharing
) -> tuple[Spans, Spans, PlanStats]:
    """Split the batch at multiples of ``tokens``: (single-row spans, multi-row spans, stats)."""
    query_start, context_len, window = batch.query_start, batch.context_len, batch.window
    A, C = context_len.size, tokens
    splits = -(-int(context_len.max(initial=0)) // C)
    starts = np.arange(splits) * C
    active = context_len > starts[:, None]
    first_position = context_len - np.diff(query_start)
    if window is not None:
        active &= starts[:, None] + C > first_position - window + 1
    # A split is shared with the left neighbour if both have all of it and the same last page.
    shared = np.zeros((splits, A), bool)
    if sharing != "off" and A > 1 and splits:
        full = context_len >= starts[:, None] + C
        last = (starts + C) // batch.page_size - 1
        last = np.minimum(last, batch.page_tables.shape[2] - 1)
        ids = batch.page_tables[:, batch.table_rows[:, None], last]
        same = (ids[:, 1:] == ids[:, :-1]).all(axis=0).T
        shared[:, 1:] = full[:, 1:] & full[:, :-1] & same
        if window is not None:
            end = starts[:, None] + C
            seen_by_all = (first_position >= end) & (context_len - window < end)
            shared[:, 1:] &= seen_by_all[:, 1:] & seen_by_all[:, :-1]
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
        np.clip(starts[split] - first_position[first], 0, None),
        0,
    )
    table_row = first
    if window is not None:
        # Nor do rows whose windows begin behind it.
        seen = starts[split] + C + window - 1 - first_position[first]
        row_end = np.where(stop - first == 1, np.minimum(row_end, row_begin + seen), row_end)
        if (stop - first > 1).any():
            table_row = _furthest_back(first_position, first, stop)
    row_begin = row_begin + skip
    spans = Spans(
        row_begin=row_begin,
        row_count=row_end - row_begin,
        table_row=table_row,
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


def _furthest_back(
    first_position: Int[np.ndarray, " A"],
    first: Int[np.ndarray, " X"],
    stop: Int[np.ndarray, " X"],
) -> Int[np.ndarray, " X"]:
    """Index of the sequence whose rows begin first, in each run of sequences first to stop - 1."""
    found = first.copy()
    for i in np.flatnonzero(stop - first > 1).tolist():
        found[i] += first_position[first[i] : stop[i]].argmin()
    return found


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
