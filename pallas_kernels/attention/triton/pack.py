"""From an AttentionPlan to the blocks that the Triton kernel takes one by one."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.triton.config import WIDE_ROWS, narrow_rows
from pallas_kernels.attention.work_list import AttentionPlan, WorkList, merge_destinations

FIELDS = 8  # one 32-byte sector a block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernels read it, for N query and K KV heads: built once a step, used by every
    layer.

    Attributes:
        blocks: (first row, live rows, table row, first KV token, end of KV tokens, first slot, 0,
            0), the live ones first, and of those the wide ones first.
        counts: live wide blocks, live blocks.
        dest: where the result of each slot goes: a merge entry, or -1 for the only result of its
            row, which goes straight to the output.
        merge_indptr: first merge entry of each row, and the end.
        entries: merge entries there is room for.
        narrow_rows: matrix rows of a narrow block.
        heads: (N, K).
    """

    blocks: Int[Array, "X 8"]
    counts: Int[Array, " 2"]
    dest: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    entries: int = dataclasses.field(metadata={"static": True})
    narrow_rows: int = dataclasses.field(metadata={"static": True})
    heads: tuple[int, int] = dataclasses.field(metadata={"static": True})


def pack_plan(plan: AttentionPlan, heads: tuple[int, int], narrow: int | None = None) -> PackedPlan:
    """Cut the lists' items into blocks of as many rows as a matrix holds; plain XLA, fixed shapes.

    Args:
        plan: the work lists.
        heads: (N, K) of the model.
        narrow: matrix rows of a narrow block, 16 to 64; None for the device's best.

    Raises:
        ValueError: more than 64 query heads a KV head.
    """
    N, K = heads
    G = N // K
    if G > WIDE_ROWS:
        raise ValueError(f"{G} query heads a KV head; the triton backend takes at most {WIDE_ROWS}")
    narrow = narrow or narrow_rows()
    wide, small, slot = [], [], 0
    for work in plan.lists:
        fits = work.tile_rows * G <= narrow
        (small if fits else wide).append(_blocks(work, slot, (narrow if fits else WIDE_ROWS) // G))
        slot += work.capacity * work.tile_rows
    blocks = jnp.concatenate(wide + small)
    live = blocks[:, 1] > 0
    # Live blocks keep their order and come first.
    place = jnp.where(live, jnp.cumsum(live) - 1, blocks.shape[0])
    packed = jnp.zeros_like(blocks).at[place].set(blocks, mode="drop")
    first_small = sum(part.shape[0] for part in wide)
    counts = jnp.stack([live[:first_small].sum(), live.sum()]).astype(jnp.int32)
    dest, indptr = merge_destinations(plan)
    return PackedPlan(
        blocks=packed,
        counts=counts,
        dest=dest,
        merge_indptr=indptr,
        entries=plan.merge_slots.shape[0],
        narrow_rows=narrow,
        heads=heads,
    )


def _blocks(work: WorkList, first_slot: int, rows: int) -> Int[Array, "X 8"]:
    """Blocks of at most ``rows`` rows, in order of the items; dead ones have no live rows."""
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
