"""From an AttentionPlan to the arrays the Mosaic kernel reads."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.work_list import AttentionPlan, WorkList

FIELDS = 8  # one 32-byte sector an item: row, rows, table row, KV from, KV to, all-visible to, 0, 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernels read it: built once a step, however many layers use it.

    Attributes:
        items: the lists one after another, FIELDS numbers an item.
        counts: live items of each list.
        dest: where the result of each slot (item, row) goes: a merge entry, or -1 for the only
            result of its row, which goes straight to the output.
        merge_indptr: first merge entry of each row, and the end.
        entries: merge entries there is room for.
        tile_rows, capacities: of each list.
    """

    items: Int[Array, "I 8"]
    counts: Int[Array, " Z"]
    dest: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    entries: int = dataclasses.field(metadata={"static": True})
    tile_rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    capacities: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def pack_plan(plan: AttentionPlan, positions: Int[Array, " T"]) -> PackedPlan:
    """Concatenate the lists and turn the merge into destinations; plain XLA, fixed shapes."""
    items = jnp.concatenate([_pack_list(work, positions) for work in plan.lists])
    counts = jnp.stack([jnp.asarray(work.num_items) for work in plan.lists])
    slots = sum(work.capacity * work.tile_rows for work in plan.lists)
    indptr = jnp.asarray(plan.merge_indptr)
    entries = jnp.arange(plan.merge_slots.shape[0], dtype=jnp.int32)
    live = entries < indptr[-1]
    # Rows with one result alone need no merge: mark their entry.
    single = indptr[1:] - indptr[:-1] == 1
    alone = jnp.zeros(entries.shape[0] + 1, bool)
    alone = alone.at[jnp.where(single, indptr[:-1], entries.shape[0])].set(True)[:-1]
    target = jnp.where(alone, -1, entries)
    dest = jnp.zeros(slots, jnp.int32)
    dest = dest.at[jnp.where(live, jnp.asarray(plan.merge_slots), slots)].set(target, mode="drop")
    return PackedPlan(
        items=items.astype(jnp.int32),
        counts=counts.astype(jnp.int32),
        dest=dest,
        merge_indptr=indptr.astype(jnp.int32),
        entries=entries.shape[0],
        tile_rows=tuple(work.tile_rows for work in plan.lists),
        capacities=tuple(work.capacity for work in plan.lists),
    )


def _pack_list(work: WorkList, positions: Int[Array, " T"]) -> Int[Array, "I 8"]:
    rows = jnp.asarray(work.row_start)[:, None] + jnp.arange(work.tile_rows)
    live = jnp.arange(work.tile_rows) < jnp.asarray(work.row_count)[:, None]
    reach = jnp.where(live, positions[jnp.where(live, rows, 0)] + 1, jnp.iinfo(jnp.int32).max)
    full_stop = jnp.minimum(reach.min(axis=1), work.kv_stop)
    zero = jnp.zeros_like(full_stop)
    return jnp.stack(
        [
            *(
                jnp.asarray(field, jnp.int32)
                for field in (
                    work.row_start,
                    work.row_count,
                    work.table_row,
                    work.kv_start,
                    work.kv_stop,
                )
            ),
            full_stop,
            zero,
            zero,
        ],
        axis=1,
    )
