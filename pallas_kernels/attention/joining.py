"""Runs of rows over runs of tokens, and how far the cuts of their items are joined."""

import dataclasses
import math

import numpy as np
from jaxtyping import Int

MOST_JOINED = 16
"""Cuts in one many-row item at most, or whoever computes it would be the last; but a run of tokens
need not be more items than this."""


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


def join_single(spans: Spans, tokens: int, capacity: int, joining: Joining) -> Spans:
    """One-row items of as many cuts as leave the busiest lane the least to do, dealt evenly.

    At most ``capacity``, but where so many cannot be joined to fewer: then as they are.
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
        order, busiest = _deal(stop - found.kv_start[first] + joining.narrow_item_tokens, joining)
        if first.size <= capacity and busiest <= least:
            best, least = (first[order], stop[order]), busiest
        if first.size <= enough:
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
