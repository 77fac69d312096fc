"""The host planner: page tables, lengths and sharing in, a work list with fixed shapes out."""

import dataclasses
import math
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int

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


MOST_JOINED = 16
"""Cuts in one item at most, where they may be joined."""


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """How far the cuts of items are joined: long items cost less than many short ones and leave
    less to merge, but enough of them must be left to keep the device busy.

    Attributes:
        least_wide_items: join those of many-row items while so many are left.
        narrow_lanes: one-row items that the device computes at once.
        narrow_item_tokens: what a one-row item costs beside its tokens, in tokens.
    """

    least_wide_items: int
    narrow_lanes: int
    narrow_item_tokens: int


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
        joining: None, or join up to ``MOST_JOINED`` cuts of an item. Then a row's arithmetic does
            depend on the batch it stands in, within rounding.
    """

    rows: int
    seqs: int
    max_context: int
    tile_rows: int
    split_tokens: int
    joining: Joining | None = None

    @property
    def item_tokens(self) -> int:
        """Tokens of an item at most."""
        return self.split_tokens * (1 if self.joining is None else MOST_JOINED)

    @property
    def cuts(self) -> int:
        """Runs of ``split_tokens`` in the longest sequence."""
        return math.ceil(self.max_context / self.split_tokens)

    @property
    def narrow_capacity(self) -> int:
        """One-row items that can be needed at most."""
        return self.cuts * min(self.seqs, self.rows)

    @property
    def wide_capacity(self) -> int:
        """Many-row items that can be needed at most: at each cut, the rows in whole tiles and one
        broken tile for each span of two rows or more."""
        spans = min(self.seqs, self.rows // 2)
        return max(1, self.cuts * (math.ceil(self.rows / self.tile_rows) + spans))

    @property
    def merge_capacity(self) -> int:
        """Partial results of all rows together, at most."""
        return self.cuts * self.rows


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
    A = context_len.shape[0]
    C, R = shape.split_tokens, shape.tile_rows
    assert C % page_size == 0 and shape.seqs >= A and query_start[-1] <= shape.rows
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
        joined = _keep_paying(joined, query_start, sharing, R, C)
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
    spans = _Spans(
        row_begin=row_begin,
        row_count=row_end - row_begin,
        table_row=first,
        kv_start=starts[cut],
        kv_stop=np.where(
            stop - first > 1, starts[cut] + C, np.minimum(starts[cut] + C, context_len[first])
        ),
    )
    single, many = spans.select(spans.row_count == 1), spans.select(spans.row_count > 1)
    if shape.joining is not None:
        single = _join_single(single, C, shape.joining)
        many = many.joined(_cuts_to_join(many, R, shape.joining.least_wide_items) * C)
    narrow = _work_list(single, shape.narrow_capacity, 1, shape.item_tokens)
    wide = _work_list(many.tiled(R), shape.wide_capacity, R, shape.item_tokens)
    indptr, slots = _merge((narrow, wide), shape, cuts)
    sizes = (stop - first) * (spans.kv_stop - spans.kv_start)
    stats = PlanStats(
        kv_tokens_read=int((spans.kv_stop - spans.kv_start).sum()),
        kv_tokens_unshared=int(sizes.sum()),
        shared_groups=int((stop - first > 1).sum()),
    )
    return AttentionPlan((narrow, wide), indptr, slots), stats


@dataclasses.dataclass(frozen=True, slots=True)
class _Spans:
    """Runs of rows that read the same run of tokens, before they are cut into tiles."""

    row_begin: Int[np.ndarray, " X"]
    row_count: Int[np.ndarray, " X"]
    table_row: Int[np.ndarray, " X"]
    kv_start: Int[np.ndarray, " X"]
    kv_stop: Int[np.ndarray, " X"]

    def select(self, chosen: np.ndarray) -> "_Spans":
        return _Spans(*(getattr(self, f.name)[chosen] for f in dataclasses.fields(self)))

    def joined(self, most_tokens: int) -> "_Spans":
        """The same rows' runs of tokens made one, up to the next multiple of ``most_tokens``."""
        keys = (self.kv_start, self.row_count, self.row_begin, self.table_row)
        found = self.select(np.lexsort(keys))
        begins = np.ones(found.kv_start.size, bool)
        begins[1:] = (found.kv_start[1:] != found.kv_stop[:-1]) | (
            found.kv_start[1:] % most_tokens == 0
        )
        for rows in (found.row_begin, found.row_count, found.table_row):
            begins[1:] |= rows[1:] != rows[:-1]
        first = np.flatnonzero(begins)
        stops = found.kv_stop[np.append(first, begins.size)[1:] - 1]
        return dataclasses.replace(found.select(first), kv_stop=stops)

    def tiled(self, tile_rows: int) -> "_Spans":
        tiles = -(-self.row_count // tile_rows)
        grown = self.select(np.repeat(np.arange(tiles.size), tiles))
        offset = (np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile_rows
        return dataclasses.replace(
            grown,
            row_begin=grown.row_begin + offset,
            row_count=np.minimum(grown.row_count - offset, tile_rows),
        )


def _cuts_to_join(spans: _Spans, tile_rows: int, least_items: int) -> int:
    """A power of two, so that about ``least_items`` items are left, or more."""
    items = int((-(-spans.row_count // tile_rows)).sum())
    joined = 1
    while joined < MOST_JOINED and items >= 2 * joined * least_items:
        joined *= 2
    return joined


def _join_single(spans: _Spans, tokens: int, joining: Joining) -> _Spans:
    """One-row items of as many cuts as leave the busiest lane the least to do, dealt evenly."""
    found = spans.select(np.lexsort((spans.kv_start, spans.row_begin)))
    goes_on = np.zeros(found.kv_start.size, bool)
    goes_on[1:] = found.kv_start[1:] == found.kv_stop[:-1]
    goes_on[1:] &= found.row_begin[1:] == found.row_begin[:-1]
    fewest = goes_on.size - np.count_nonzero(goes_on)
    best, least, joined = (np.arange(goes_on.size), found.kv_stop), math.inf, 1
    while joined <= MOST_JOINED:
        first = np.flatnonzero(~goes_on | (found.kv_start % (joined * tokens) == 0))
        stop = found.kv_stop[np.append(first, goes_on.size)[1:] - 1]
        order, busiest = _deal(stop - found.kv_start[first] + joining.narrow_item_tokens, joining)
        if busiest <= least:
            best, least = (first[order], stop[order]), busiest
        if first.size <= max(joining.narrow_lanes, fewest):
            break
        joined *= 2
    chosen, stop = best
    return dataclasses.replace(found.select(chosen), kv_stop=stop)


def _deal(
    costs: Int[np.ndarray, " X"], joining: Joining
) -> tuple[Int[np.ndarray, " X"], int | np.integer]:
    """An order in which items that the lanes take in turn load them alike; the largest load.

    The longest first, every second round from its other end.
    """
    lanes = joining.narrow_lanes
    order = np.argsort(-costs, kind="stable")
    whole, rest = np.split(order, [order.size // lanes * lanes])
    whole = whole.reshape(-1, lanes)
    whole[::-2] = whole[::-2, ::-1].copy()  # the last whole round too, before what is left
    loads = costs[whole].sum(axis=0)
    loads[: rest.size] += costs[rest]
    return np.concatenate([whole.ravel(), rest]), loads.max()


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


def _work_list(spans: _Spans, capacity: int, tile_rows: int, tile_tokens: int) -> WorkList:
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
    lists: tuple[WorkList, ...], shape: PlanShape, cuts: int
) -> tuple[Int[np.ndarray, " T1"], Int[np.ndarray, " X"]]:
    """Partial results of each row, in order of the tokens they cover."""
    # At most one item covers a row at a cut: a table of slots by row and cut is sorted by itself.
    table = np.full((shape.rows, cuts), -1, np.int32)
    base = 0
    for items in lists:
        count = np.asarray(items.row_count)[: int(items.num_items)]
        item = np.repeat(np.arange(count.size, dtype=np.int32), count)
        offset = np.arange(item.size, dtype=np.int32) - (count.cumsum() - count)[item]
        row = np.asarray(items.row_start)[item] + offset
        cut = np.asarray(items.kv_start)[item] // shape.split_tokens
        table[row, cut] = base + item * items.tile_rows + offset
        base += items.capacity * items.tile_rows
    found = table >= 0
    indptr = np.zeros(shape.rows + 1, np.int32)
    found.sum(1).cumsum(out=indptr[1:], dtype=np.int32)
    merged = np.zeros(shape.merge_capacity, np.int32)
    slots = table[found]
    merged[: slots.size] = slots
    return indptr, merged
