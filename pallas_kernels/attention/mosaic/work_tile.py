"""The work tile: what one CTA computes between two turns of the tile scheduler.

A work tile is one item of a work list on one or two KV heads. There are two kinds:
  - cooperative: the item has more than 64 matrix rows (query rows times heads of a group). Both
    consumer warpgroups work on one KV head, 64 matrix rows each, in KV steps of 128 tokens that
    both read.
  - head pair: the item has at most 64 matrix rows. Each consumer warpgroup works on a KV head of
    its own, in KV steps of 64 tokens.
A record of a work tile in GMEM is int32 [8], one 32-byte sector; ``pack`` writes it and
``WorkTile.decode`` reads it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE

NUM_FIELDS = 8
(
    ROW_START,
    NUM_ROWS,
    TABLE_ROW,
    KV_START,
    KV_STOP,
    UNMASKED_STOP,
    RESULT_SLOT,
    HEAD_AND_LIST,
) = range(NUM_FIELDS)
"""Fields of a record; see ``WorkTile``."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorkListShape:
    """Static part of one work list: rows of an item, and the kind of its work tiles."""

    tile_rows: int
    cooperative: bool

    @property
    def warpgroup_rows(self) -> int:
        """Query rows of an item that one warpgroup takes."""
        return -(-self.tile_rows // 2) if self.cooperative else self.tile_rows


@dataclasses.dataclass(frozen=True, slots=True)
class WorkTile:
    """A decoded record. All are int32 scalars in registers, except ``cooperative``.

    Attributes:
        row_start, num_rows: query rows of the item; ``num_rows`` is 0 beyond the last work tile.
        table_row: row of the page table.
        kv_start, kv_stop: KV tokens of the item.
        unmasked_stop: every row sees all tokens before it, from ``kv_start`` on, unless there is a
            sliding window.
        result_slot: slot of the first row's result in ``PackedPlan.destinations``.
        head: first KV head.
        list_index: index of the item's work list.
        cooperative: bool scalar, the kind of the work tile.
        warpgroup_rows: rows of a cooperative item that the first warpgroup takes.
        num_steps: KV steps.
    """

    row_start: Any
    num_rows: Any
    table_row: Any
    kv_start: Any
    kv_stop: Any
    unmasked_stop: Any
    result_slot: Any
    head: Any
    list_index: Any
    cooperative: Any
    warpgroup_rows: Any
    num_steps: Any

    @classmethod
    def decode(cls, record: tuple[Any, ...], lists: tuple[WorkListShape, ...]) -> "WorkTile":
        """record: the int32 scalars of a work tile."""
        code = record[HEAD_AND_LIST]
        head = lax.div(code, jnp.int32(len(lists)))
        which = code - head * len(lists)
        cooperative = jnp.bool_(any(work.cooperative for work in lists))
        rows = jnp.int32(0)
        for index, work in enumerate(lists):
            cooperative = jnp.where(which == index, work.cooperative, cooperative)
            rows = jnp.where(which == index, work.warpgroup_rows, rows)
        tokens = jnp.where(cooperative, 2 * KV_TILE, KV_TILE)
        steps = lax.div(record[KV_STOP] - record[KV_START] + tokens - 1, tokens)
        return cls(
            row_start=record[ROW_START],
            num_rows=record[NUM_ROWS],
            table_row=record[TABLE_ROW],
            kv_start=record[KV_START],
            kv_stop=record[KV_STOP],
            unmasked_stop=record[UNMASKED_STOP],
            result_slot=record[RESULT_SLOT],
            head=head,
            list_index=which,
            cooperative=cooperative,
            warpgroup_rows=rows,
            num_steps=steps,
        )
