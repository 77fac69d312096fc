"""The work list of a grouped GEMM: tiles of rows with the same expert, made on the device.

A pair is a row and one of its experts. Pairs are laid out by expert, in the order of the rows, and
every expert starts a new tile; what is left of its last tile stays empty. The shapes follow from
the numbers of rows and experts alone, so a new routing never recompiles.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

TILE_ROWS = (8, 16, 32, 64, 128)
"""Rows of a tile."""


@no_type_check  # JAX also builds it with other leaves than arrays
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class WorkList:
    """Tiles of rows, sorted by expert.

    A slot is a row of a tile: slot s is row s % R of tile s // R, for tiles of R rows.

    Attributes:
        tile_expert: the expert of each tile; unspecified from ``num_tiles`` on.
        num_tiles: tiles that have rows.
        slot_pair: the pair of each slot, row * X + which of its X experts; -1 of empty slots.
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
    """Rows of a tile for so many pairs: the least that hold an expert's average share."""
    share = pairs / num_experts
    return next((rows for rows in TILE_ROWS if rows >= share), TILE_ROWS[-1])


def max_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Tiles of any routing at most: each of the experts with pairs has one that is not full."""
    touched = min(pairs, num_experts)
    return touched + (pairs - touched) // rows


def make_work_list(
    experts: Int[Array, "T X"], num_experts: int, rows: int | None = None
) -> WorkList:
    """The work list of a routing.

    Args:
        experts: of each row; ``num_experts`` or more for none.
        num_experts: J.
        rows: of a tile; None for `tile_rows`.
    """
    pairs = experts.size
    R = rows or tile_rows(pairs, num_experts)
    tiles = max_tiles(pairs, num_experts, R)
    expert = jnp.minimum(experts.reshape(-1), num_experts)
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)[:num_experts]
    ends = jnp.cumsum(-(-counts // R))  # tiles up to and with each expert
    first_slot = jnp.append((ends - (-(-counts // R))) * R, tiles * R)
    order = jnp.argsort(expert, stable=True)
    first_pair = jnp.append(jnp.cumsum(counts) - counts, 0)
    sorted_expert = expert[order]
    rank = jnp.arange(pairs) - first_pair[sorted_expert]
    slot = jnp.where(sorted_expert < num_experts, first_slot[sorted_expert] + rank, tiles * R)
    slot = slot.astype(jnp.int32)
    return WorkList(
        tile_expert=jnp.searchsorted(ends, jnp.arange(tiles), side="right").astype(jnp.int32),
        num_tiles=ends[-1:].astype(jnp.int32),
        slot_pair=jnp.full(tiles * R, -1, jnp.int32)
        .at[slot]
        .set(order.astype(jnp.int32), mode="drop"),
        pair_slot=jnp.zeros(pairs, jnp.int32).at[order].set(slot).reshape(experts.shape),
    )
