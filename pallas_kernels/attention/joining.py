"""Runs of rows over runs of tokens, and how far the cuts of their items are joined."""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

MOST_JOINED = 16
"""Cuts in one many-row item at most, or whoever computes it would be the last; but a run of tokens
need not be more items than this."""

_LAST_ROUNDS = 4  # that are dealt one by one: what those before leave uneven is little


@dataclasses.dataclass(frozen=True, slots=True)
class Joining:
    """How far the cuts of items are joined: long items cost less than many short ones and leave
    less to merge, but enough of them must be left to keep the device busy.

    Attributes:
        least_wide_items: join those of many-row items while so many are left.
        narrow_lanes: one-row items that the device computes at once.
        item_tokens: what an item costs beside its tokens, in tokens.
        wide_lanes: of those lanes, how many a many-row item takes.
        paired_rows: one of so many rows or fewer takes a single lane.
    """

    least_wide_items: int
    narrow_lanes: int
    item_tokens: int
    wide_lanes: int = 1
    paired_rows: int = 0

    def taken(self, tokens: Int[np.ndarray, " X"], tile_rows: int) -> Int[np.ndarray, " Y"]:
        """What many-row items of so many tokens, at most ``tile_rows`` rows each, cost each of the
        lanes that they take, one after another, in tokens."""
        lanes = 1 if tile_rows <= self.paired_rows else self.wide_lanes
        return np.repeat(tokens + self.item_tokens, lanes)


@dataclasses.dataclass(frozen=True, slots=True)
class Spans:
    """Runs of rows that read the same run of tokens, before they are cut into tiles."""

    row_begin: Int[np.ndarray, " X"]
    row_count: Int[np.ndarray, " X"]
    table_row: Int[np.ndarray, " X"]
    kv_start: Int[np.ndarray, " X"]
    kv_stop: Int[np.ndarray, " X"]

    def select(self, chosen: np.ndarray) -> "Spans":
        return Spans(*(getattr(self, f.name)[chosen] for f in dataclasses.fields(self)))

    def joined(self, most_tokens: int) -> "Spans":
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

    def tiled(self, tile_rows: int) -> "Spans":
        tiles = -(-self.row_count // tile_rows)
        grown = self.select(np.repeat(np.arange(tiles.size), tiles))
        offset = (np.arange(tiles.sum()) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile_rows
        return dataclasses.replace(
            grown,
            row_begin=grown.row_begin + offset,
            row_count=np.minimum(grown.row_count - offset, tile_rows),
        )


def join_many(spans: Spans, tokens: int, tile_rows: int, joining: Joining) -> Spans:
    """Many-row items of as many cuts, a power of two, as leave about ``least_wide_items``, but of
    no more than ``MOST_JOINED`` allows."""
    items = int((-(-spans.row_count // tile_rows)).sum())
    cuts = int(spans.kv_stop.max(initial=0)) // tokens
    most = max(MOST_JOINED, cuts // MOST_JOINED)
    joined = 1
    while joined < most and items >= 2 * joined * joining.least_wide_items:
        joined *= 2
    return spans.joined(joined * tokens)


def join_single(
    spans: Spans, tokens: int, capacity: int, joining: Joining, before: Int[np.ndarray, " Y"]
) -> Spans:
    """One-row items of as many cuts as leave the busiest lane the least to do, dealt evenly.

    At most ``capacity``, but where so many cannot be joined to fewer: then as they are. ``before``:
    what the lanes take first (``Joining.taken``).
    """
    found = spans.select(np.lexsort((spans.kv_start, spans.row_begin)))
    goes_on = np.zeros(found.kv_start.size, bool)
    goes_on[1:] = found.kv_start[1:] == found.kv_stop[:-1]
    goes_on[1:] &= found.row_begin[1:] == found.row_begin[:-1]
    fewest = goes_on.size - np.count_nonzero(goes_on)
    enough = max(fewest, min(joining.narrow_lanes, capacity))
    best, least, joined = (np.arange(goes_on.size), found.kv_stop), math.inf, 1
    while True:
        first = np.flatnonzero(~goes_on | (found.kv_start % (joined * tokens) == 0))
        stop = found.kv_stop[np.append(first, goes_on.size)[1:] - 1]
        costs = stop - found.kv_start[first] + joining.item_tokens
        order, busiest = _deal(costs, before, joining.narrow_lanes)
        if first.size <= capacity and busiest <= least:
            best, least = (first[order], stop[order]), busiest
        if first.size <= enough:
            break
        joined *= 2
    chosen, stop = best
    return dataclasses.replace(found.select(chosen), kv_stop=stop)


def _deal(
    costs: Int[np.ndarray, " X"], before: Int[np.ndarray, " Y"], lanes: int
) -> tuple[Int[np.ndarray, " X"], int]:
    """An order in which items that the lanes take in turn load them alike; the largest load.

    The lanes take what is ``before`` first, and a last round that is not whole from its other end,
    if none of that is in it (as programs do, ``mosaic.order``). In each of the last rounds the
    longest items go where there is the least to do; the many before, if there are, turn by turn.
    """
    Y, total = before.size, before.size + costs.size
    rest = total % lanes
    lane = np.arange(total) % lanes
    if rest <= costs.size:
        lane[total - rest :] = lanes - 1 - lane[total - rest :]
    loads = np.bincount(lane[:Y], before, lanes)
    longest, order = np.argsort(-costs, kind="stable"), np.empty(costs.size, np.int64)
    start = Y
    while start < total:
        rounds = 1 if start % lanes else max(1, (total - start) // lanes - _LAST_ROUNDS)
        stop = min((start // lanes + rounds) * lanes, total)
        free = np.argsort(loads[lane[start : start + (stop - start) // rounds]], kind="stable")
        place = free + np.arange(start - Y, stop - Y, free.size)[:, None]
        place[1::2] = place[1::2, ::-1].copy()
        order[place] = longest[start - Y : stop - Y].reshape(place.shape)
        loads = loads + np.bincount(lane[start:stop], costs[order[start - Y : stop - Y]], lanes)
        start = stop
    return order, int(loads.max())
