"""The work list of a grouped GEMM: tiles of rows with the same expert, made on the device.

A pair is a row and one of its experts. Pairs are laid out by expert, in the order of the rows, and
every expert starts a new tile; the rest of its last tile stays empty. The shapes follow from
the numbers of rows and experts alone, so a new routing never recompiles.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

TILE_ROWS = (8, 16, 32, 64, 128)
"""Rows of a tile."""
_MAX_COMPARED = 1024  # pairs


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class WorkList:
    """Tiles of rows, sorted by expert.

    A slot is a row of a tile: slot s is row s % R of tile s // R, for tiles of R rows.

    Attributes:
        tile_expert: the expert of each tile; unspecified from ``num_tiles`` on.
        num_tiles: tiles that have rows.
        slot_pair: the pair of each slot, row * X + which of its X experts; -1 for empty slots.
        pair_slot: the slot of each pair; the number of slots for a pair without an expert.
    """

    tile_expert: Int[Array, " tiles"]
    num_tiles: Int[Array, " 1"]
    slot_pair: Int[Array, " slots"]
    pair_slot: Int[Array, "T X"]

    @property
    def tile_rows(self) -> int:
        """R."""
        return self.slot_pair.shape[0] // self.tile_expert.shape[0]

    @property
    def slot_row(self) -> Int[Array, " slots"]:
        """The row of each slot; row 0 for empty slots."""
        return jnp.maximum(self.slot_pair, 0) // self.pair_slot.shape[1]


def tile_rows(pairs: int, num_experts: int) -> int:
    """Rows of a tile: the least that hold twice an expert's average share of the pairs.

    Then few experts have a second tile, for which their weights are read again.
    """
    share = pairs / num_experts
    return next((rows for rows in TILE_ROWS if rows >= 2 * share), TILE_ROWS[-1])


def max_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Most tiles of any routing: each of the experts with pairs has one that is not full."""
    touched = min(pairs, num_experts)
    return touched + (pairs - touched) // rows


def make_work_list(
    experts: Int[Array, "T X"],
    num_experts: int,
    rows: int | None = None,
    *,
    num_elsewhere: int = 0,
) -> WorkList:
    """The work list of a routing.

    Args:
        experts: the experts of each row; ``num_experts`` or more for none.
        num_experts: J, of this device.
        rows: rows of a tile; None for `tile_rows` of all experts.
        num_elsewhere: experts of other devices, whose pairs are none of this device. Any number of
            pairs may be.
    """
    T, X = experts.shape
    R = rows or tile_rows(T * X, num_experts + num_elsewhere)
    tiles = max_tiles(T * X, num_experts, R)
    if T == 1 and not num_elsewhere:  # the experts of a row differ, so each pair is a tile
        return _one_row(experts.reshape(-1), R)
    expert = jnp.minimum(experts.reshape(-1), num_experts)
    each = jnp.arange(num_experts)
    counts = (expert == each[:, None]).sum(1)
    of_expert = -(-counts // R)
    ends = jnp.where(each <= each[:, None], of_expert, 0).sum(1)  # tiles up to and with each
    first_slot = jnp.append((ends - of_expert) * R, tiles * R)
    rank = (_rank_by_sorting if T * X > _MAX_COMPARED else _rank_by_comparing)(expert, counts)
    slot = jnp.where(expert < num_experts, first_slot[expert] + rank, tiles * R).astype(jnp.int32)
    return WorkList(
        tile_expert=(ends <= jnp.arange(tiles)[:, None]).sum(1).astype(jnp.int32),
        num_tiles=ends[-1:].astype(jnp.int32),
        slot_pair=_pairs(slot, tiles * R),
        pair_slot=slot.reshape(T, X),
    )


def _pairs(slot: Int[Array, " pairs"], slots: int) -> Int[Array, " slots"]:
    """The pair of each slot; -1 where there is none."""
    pairs = jnp.arange(len(slot), dtype=jnp.int32)
    if len(slot) > _MAX_COMPARED:
        return jnp.full(slots, -1, jnp.int32).at[slot].set(pairs, mode="drop")
    # One reduction, where a scatter takes two kernels.
    return jnp.where(slot == jnp.arange(slots)[:, None], pairs, -1).max(1)


def _one_row(expert: Int[Array, " X"], rows: int) -> WorkList:
    """The work list of one row, whose experts are all below J."""
    X = len(expert)
    pairs = np.arange(X, dtype=np.int32)
    slot_pair = np.where(np.arange(rows) == 0, pairs[:, None], np.int32(-1)).reshape(-1)
    return WorkList(
        tile_expert=expert.astype(jnp.int32),
        # Literals: XLA computes what `jnp` makes of these in kernels of their own.
        num_tiles=jnp.asarray(np.full(1, X, np.int32)),
        slot_pair=jnp.asarray(slot_pair),
        pair_slot=jnp.asarray(pairs[None] * np.int32(rows)),
    )


def _rank_by_comparing(expert: Int[Array, " pairs"], counts: Array) -> Int[Array, " pairs"]:
    """How many pairs before each have its expert: one reduction, for few pairs."""
    del counts
    at = jnp.arange(len(expert))
    return ((expert == expert[:, None]) & (at < at[:, None])).sum(1)


def _rank_by_sorting(
    expert: Int[Array, " pairs"], counts: Int[Array, " J"]
) -> Int[Array, " pairs"]:
    """How many pairs before each have its expert: by sorting, for many pairs."""
    order = jnp.argsort(expert, stable=True)
    first = jnp.append(jnp.cumsum(counts) - counts, counts.sum())
    rank = jnp.arange(len(expert)) - first[expert[order]]
    return jnp.zeros_like(rank).at[order].set(rank)
