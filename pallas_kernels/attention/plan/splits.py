"""KV splits: how the splits of attention items are coalesced and balanced over the device's lanes.

The planner splits the KV of every item at fixed multiples of the KV split size. Long items cost
less than many short ones and leave fewer partial results to merge, so neighbouring splits of the
same rows are coalesced while enough items remain to keep the device busy. A lane is one item that
the device computes at a time, such as one KV head of a CTA. All of it is NumPy on the host.
"""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

MAX_COALESCED_SPLITS = 16
"""Splits of one multi-row item at most, because a longer item would finish last. Longer items are
allowed where a run of tokens would otherwise become more than this many items."""

MAX_PREFIX_SPLITS = 4
"""Most KV splits in one split of a prefix. Longer items save few partial results, and with many
prefixes the loads of the lanes differ more."""

_BALANCED_ROUNDS = 4  # last rounds that are balanced one by one; earlier imbalance is small


@dataclasses.dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How far the splits of items are coalesced.

    Attributes:
        min_multi_row_items: multi-row items that must remain.
        single_row_lanes: single-row items that the device computes at once.
        item_overhead: overhead of an item, in tokens.
        multi_row_lanes: lanes that a multi-row item takes.
        single_lane_rows: multi-row items of at most this many rows take a single lane.
    """

    min_multi_row_items: int
    single_row_lanes: int
    item_overhead: int
    multi_row_lanes: int = 1
    single_lane_rows: int = 0

    def lane_loads(self, tokens: Int[np.ndarray, " X"], tile_rows: int) -> Int[np.ndarray, " Y"]:
        """The load of each lane that multi-row items take, one after another, in tokens.

        tokens: KV tokens of each item; tile_rows: rows of an item at most.
        """
        lanes = 1 if tile_rows <= self.single_lane_rows else self.multi_row_lanes
        return np.repeat(tokens + self.item_overhead, lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """Runs of rows that read the same run of tokens, before they are split into tiles of rows."""

    row_begin: Int[np.ndarray, " X"]
    row_count: Int[np.ndarray, " X"]
    table_row: Int[np.ndarray, " X"]
    kv_start: Int[np.ndarray, " X"]
    kv_stop: Int[np.ndarray, " X"]

    def select(self, chosen: np.ndarray) -> "Spans":
        """The spans at these indices, or under this mask."""
        return Spans(*(getattr(self, f.name)[chosen] for f in dataclasses.fields(self)))

    def coalesced(self, max_tokens: int) -> "Spans":
        """Merge adjoining runs of tokens of the same rows, up to multiples of ``max_tokens``."""
        keys = (self.kv_start, self.row_count, self.row_begin, self.table_row)
        found = self.select(np.lexsort(keys))
        begins = np.ones(found.kv_start.size, bool)
        begins[1:] = (found.kv_start[1:] != found.kv_stop[:-1]) | (
            found.kv_start[1:] % max_tokens == 0
        )
        for rows in (found.row_begin, found.row_count, found.table_row):
            begins[1:] |= rows[1:] != rows[:-1]
        first = np.flatnonzero(begins)
        stops = found.kv_stop[np.append(first, begins.size)[1:] - 1]
        return dataclasses.replace(found.select(first), kv_stop=stops)

    def tiled(self, tile_rows: int) -> "Spans":
        """Split the rows into tiles of at most ``tile_rows``."""
        tiles = -(-self.row_count // tile_rows)
        repeated = self.select(np.repeat(np.arange(tiles.size), tiles))
        offset = (np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile_rows
        return dataclasses.replace(
            repeated,
            row_begin=repeated.row_begin + offset,
            row_count=np.minimum(repeated.row_count - offset, tile_rows),
        )


def coalesce_multi_row(
    spans: Spans, tokens: int, tile_rows: int, split_policy: SplitPolicy
) -> Spans:
    """Coalesce the splits of multi-row spans.

    Takes the largest power of two of splits that leaves about ``min_multi_row_items`` items and
    that ``MAX_COALESCED_SPLITS`` allows. tokens: the KV split size.
    """
    items = int((-(-spans.row_count // tile_rows)).sum())
    splits = int(spans.kv_stop.max(initial=0)) // tokens
    largest = max(MAX_COALESCED_SPLITS, splits // MAX_COALESCED_SPLITS)
    factor = 1
    while factor < largest and items >= 2 * factor * split_policy.min_multi_row_items:
        factor *= 2
    return spans.coalesced(factor * tokens)


def prefix_split_size(
    rows: int, max_context: int, tile_rows: int, tokens: int, split_policy: SplitPolicy | None
) -> int:
    """Tokens of a split of a prefix, for a plan whose splits do not depend on the batch.

    Takes the largest power of two of ``tokens`` that ``MAX_PREFIX_SPLITS`` allows and that leaves
    twice ``min_multi_row_items`` items where all rows share ``max_context`` tokens.
    """
    if split_policy is None:
        return tokens
    splits, factor = math.ceil(max_context / tokens), 1
    items, least = math.ceil(rows / tile_rows) * splits, 2 * split_policy.min_multi_row_items
    while 2 * factor <= min(splits, MAX_PREFIX_SPLITS) and items >= 2 * factor * least:
        factor *= 2
    return factor * tokens


def coalesce_single_row(
    spans: Spans,
    tokens: int,
    capacity: int,
    split_policy: SplitPolicy,
    before: Int[np.ndarray, " Y"],
) -> Spans:
    """Coalesce the splits of single-row spans, and order them for balanced lanes.

    Takes the power of two of splits with the smallest load of the busiest lane.

    Args:
        spans: spans of one row each.
        tokens: the KV split size.
        capacity: items that there is room for. If even whole rows are more, the spans come back
            uncoalesced.
        split_policy: lanes and overhead.
        before: loads that the lanes take first, see ``SplitPolicy.lane_loads``.
    """
    found = spans.select(np.lexsort((spans.kv_start, spans.row_begin)))
    continues = np.zeros(found.kv_start.size, bool)
    continues[1:] = found.kv_start[1:] == found.kv_stop[:-1]
    continues[1:] &= found.row_begin[1:] == found.row_begin[:-1]
    fewest = continues.size - np.count_nonzero(continues)
    enough = max(fewest, min(split_policy.single_row_lanes, capacity))
    best, least, factor = (np.arange(continues.size), found.kv_stop), math.inf, 1
    while True:
        first = np.flatnonzero(~continues | (found.kv_start % (factor * tokens) == 0))
        stop = found.kv_stop[np.append(first, continues.size)[1:] - 1]
        costs = stop - found.kv_start[first] + split_policy.item_overhead
        order, busiest = _balance(costs, before, split_policy.single_row_lanes)
        if first.size <= capacity and busiest <= least:
            best, least = (first[order], stop[order]), busiest
        if first.size <= enough:
            break
        factor *= 2
    chosen, stop = best
    return dataclasses.replace(found.select(chosen), kv_stop=stop)


def _balance(
    costs: Int[np.ndarray, " X"], before: Int[np.ndarray, " Y"], lanes: int
) -> tuple[Int[np.ndarray, " X"], int]:
    """(an order of the items that balances the lanes, the largest load).

    The lanes take items in turn, those of ``before`` first. A last round that is not full starts
    from the last lane, if no item of ``before`` is in it (as in ``mosaic.tile_scheduler``). In each
    of the last rounds the longest items go to the lanes with the least load; the items of earlier
    rounds go turn by turn, each round in the opposite direction of the one before.

    Args:
        costs: cost of each item, in tokens.
        before: costs of the items that come first.
        lanes: number of lanes that take the items.
    """
    first, total = before.size, before.size + costs.size
    rest = total % lanes
    lane = np.arange(total) % lanes
    if rest <= costs.size:
        lane[total - rest :] = lanes - 1 - lane[total - rest :]
    loads = np.bincount(lane[:first], before, lanes)
    longest, order = np.argsort(-costs, kind="stable"), np.empty(costs.size, np.int64)
    start = first
    while start < total:
        rounds = 1 if start % lanes else max(1, (total - start) // lanes - _BALANCED_ROUNDS)
        stop = min((start // lanes + rounds) * lanes, total)
        free = np.argsort(loads[lane[start : start + (stop - start) // rounds]], kind="stable")
        place = free + np.arange(start - first, stop - first, free.size)[:, None]
        place[1::2] = place[1::2, ::-1].copy()
        order[place] = longest[start - first : stop - first].reshape(place.shape)
        loads = loads + np.bincount(
            lane[start:stop], costs[order[start - first : stop - first]], lanes
        )
        start = stop
    return order, int(loads.max())
