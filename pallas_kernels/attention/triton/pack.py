"""Packs an AttentionPlan into the blocks of rows that the Triton kernel reads: plain XLA, fixed
shapes."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, WorkList, merge_destinations
from rjax.pallas_kernels.attention.triton.config import BLOCK_M, small_block_m

FIELDS = 8  # one 32-byte sector a block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernel reads it, for N query and K KV heads. Every layer of a step uses it.

    Attributes:
        blocks: (first row, live rows, table row, first KV token, end of KV tokens, first result
            slot, 0, 0). Live blocks come first, and of these the large ones.
        counts: live large blocks, live blocks.
        destinations: where the result of each slot goes: a merge entry, or -1 for the only result
            of its row, which goes to the output.
        merge_indptr: first merge entry of each row, and the end.
        num_merge_entries: capacity for merge entries.
        small_block_m: matrix rows of a small block.
        heads: (N, K).
    """

    blocks: Int[Array, "X 8"]
    counts: Int[Array, " 2"]
    destinations: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    num_merge_entries: int = dataclasses.field(metadata={"static": True})
    small_block_m: int = dataclasses.field(metadata={"static": True})
    heads: tuple[int, int] = dataclasses.field(metadata={"static": True})


def pack_plan(
    plan: AttentionPlan, heads: tuple[int, int], small_m: int | None = None
) -> PackedPlan:
    """Split the items of the lists into blocks of as many rows as a matrix tile holds.

    Args:
        plan: the work lists.
        heads: (N, K) of the model.
        small_m: matrix rows of a small block, 16 to 64; None for the device's best.

    Raises:
        ValueError: more than 64 query heads a KV head.
    """
    N, K = heads
    G = N // K
    if G > BLOCK_M:
        raise ValueError(f"{G} query heads a KV head; the triton backend takes at most {BLOCK_M}")
    small_m = small_m or small_block_m()
    large_blocks, small_blocks, first_slot = [], [], 0
    for work in plan.lists:
        fits = work.tile_rows * G <= small_m
        (small_blocks if fits else large_blocks).append(
            _blocks(work, first_slot, (small_m if fits else BLOCK_M) // G)
        )
        first_slot += work.capacity * work.tile_rows
    blocks = jnp.concatenate(large_blocks + small_blocks)
    live = blocks[:, 1] > 0
    # Live blocks keep their order and come first.
    place = jnp.where(live, jnp.cumsum(live) - 1, blocks.shape[0])
    packed = jnp.zeros_like(blocks).at[place].set(blocks, mode="drop")
    first_small = sum(group.shape[0] for group in large_blocks)
    counts = jnp.stack([live[:first_small].sum(), live.sum()]).astype(jnp.int32)
    destinations, indptr = merge_destinations(plan)
    return PackedPlan(
        blocks=packed,
        counts=counts,
        destinations=destinations,
        merge_indptr=indptr,
        num_merge_entries=plan.merge_slots.shape[0],
        small_block_m=small_m,
        heads=heads,
    )


def _blocks(work: WorkList, first_slot: int, rows: int) -> Int[Array, "X 8"]:
    """Blocks of at most ``rows`` rows, in order of the items; unused ones have no live rows."""
    offset = jnp.arange(0, work.tile_rows, rows, dtype=jnp.int32)
    item = jnp.arange(work.capacity, dtype=jnp.int32)[:, None]

    def column(value) -> Int[Array, " X"]:
        shape = (work.capacity, offset.size)
        return jnp.broadcast_to(jnp.asarray(value, jnp.int32), shape).ravel()

    def field(value) -> Array:
        return jnp.asarray(value)[:, None]

    live = jnp.where(item < jnp.asarray(work.num_items), field(work.row_count), 0)
    columns = [
        column(field(work.row_start) + offset),
        column(jnp.clip(live - offset, 0, rows)),
        column(field(work.table_row)),
        column(field(work.kv_start)),
        column(field(work.kv_stop)),
        column(first_slot + item * work.tile_rows + offset),
    ]
    return jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, FIELDS - len(columns))))
