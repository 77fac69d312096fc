"""From an AttentionPlan to the arrays the Mosaic kernel reads."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.attention.mosaic.config import TILE
from pallas_kernels.attention.work_list import AttentionPlan, WorkList, merge_destinations
from pallas_kernels.mosaic_emit import multiprocessors

FIELDS = 8  # one 32-byte sector a unit
ROW, ROWS_LIVE, TABLE_ROW, KV_START, KV_STOP, ALL_VISIBLE, SLOT, HEAD_AND_LIST = range(FIELDS)
_LONG_WIDE, _LONG_PAIRED = 768, 1792  # tokens a program, on an H200: see bench/kernels/README.md


@dataclasses.dataclass(frozen=True, slots=True)
class ListShape:
    """The static part of one work list: rows an item, and whether an item fills two warpgroups."""

    tile_rows: int
    wide: bool

    @property
    def half_rows(self) -> int:
        """Rows of an item that one warpgroup takes."""
        return -(-self.tile_rows // 2) if self.wide else self.tile_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernels read it, for N query and K KV heads: built once a step, used by every
    layer.

    Attributes:
        units: work in the order it is taken: (first row, live rows, table row, first KV token, end
            of KV tokens, end of the KV tokens that all rows see, first slot, head * lists + list).
            Units at ``num_units`` and beyond have no live rows.
        num_units: live units.
        num_wide: of them those of wide lists, which come first.
        turned: 1 if every second program takes its units backwards, else 0.
        dest: where the result of each slot (item, row) goes: a merge entry, or -1 for the only
            result of its row, which goes straight to the output.
        merge_indptr: first merge entry of each row, and the end.
        entries: merge entries there is room for.
        lists: of the plan, widest first.
        heads: (N, K).
    """

    units: Int[Array, "U 8"]
    num_units: Int[Array, ""]
    num_wide: Int[Array, ""]
    turned: Int[Array, ""]
    dest: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    entries: int = dataclasses.field(metadata={"static": True})
    lists: tuple[ListShape, ...] = dataclasses.field(metadata={"static": True})
    heads: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def order(self) -> Int[Array, "3"]:
        """What ``Turns.of`` is told."""
        return jnp.stack([self.num_units, self.num_wide, self.turned])


def pack_plan(
    plan: AttentionPlan, positions: Int[Array, " T"], heads: tuple[int, int] | None = None
) -> PackedPlan | AttentionPlan:
    """Decode the lists into units and the merge into destinations; plain XLA, fixed shapes.

    A unit is one item on one KV head where the item fills more than 64 matrix rows, else on two.
    ``heads`` is (N, K) of the model; without it the plan comes back as it is, and each attention
    call packs it (inside one jit XLA computes that once for all layers).
    """
    if heads is None:
        return plan
    N, K = heads
    order = sorted(range(len(plan.lists)), key=lambda i: -plan.lists[i].tile_rows)
    lists, blocks, counts = [], [], []
    for place, i in enumerate(order):
        work = plan.lists[i]
        slot = sum(w.capacity * w.tile_rows for w in plan.lists[:i])
        wide = work.tile_rows * (N // K) > TILE
        per_unit = 1 if wide else 2
        units = -(-K // per_unit)
        lists.append(ListShape(work.tile_rows, wide))
        blocks.append(_units(work, positions, slot, units, per_unit, place, len(order)))
        counts.append(jnp.asarray(work.num_items, jnp.int32) * units)
    # The live units of all lists, one after another.
    starts = jnp.cumsum(jnp.stack([jnp.int32(0), *counts]))
    room = sum(block.shape[0] for block in blocks)
    place = jnp.arange(room, dtype=jnp.int32)
    source, base = jnp.zeros_like(place), 0
    for which, block in enumerate(blocks):
        source = jnp.where(place >= starts[which], base + place - starts[which], source)
        base += block.shape[0]
    units = jnp.concatenate(blocks)[jnp.clip(source, 0, room - 1)]
    units = jnp.where((place < starts[-1])[:, None], units, 0)
    num_wide = starts[sum(work.wide for work in lists)]
    dest, indptr = merge_destinations(plan)
    return PackedPlan(
        units=units,
        num_units=starts[-1],
        num_wide=num_wide,
        turned=_turned(units, num_wide, lists),
        dest=dest,
        merge_indptr=indptr,
        entries=plan.merge_slots.shape[0],
        lists=tuple(lists),
        heads=heads,
    )


def _turned(
    units: Int[Array, "U 8"], num_wide: Int[Array, ""], lists: list[ListShape]
) -> Int[Array, ""]:
    """1 where wide units and the others both take a program long.

    Wide units compute and the others wait for memory, so that they had better run side by side.
    Where one kind is soon done, all programs had better end with the shorter units: those load
    while the wide ones still compute, and end together.
    """
    if len({work.wide for work in lists}) == 1:
        return jnp.int32(0)
    tokens = (units[:, KV_STOP] - units[:, KV_START]).astype(jnp.float32)
    wide = jnp.where(jnp.arange(tokens.size) < num_wide, tokens, 0).sum()
    paired = tokens.sum() - wide
    programs = multiprocessors()
    long = (wide >= _LONG_WIDE * programs) & (paired >= _LONG_PAIRED * programs)
    return long.astype(jnp.int32)


def _units(
    work: WorkList,
    positions: Int[Array, " T"],
    first_slot: int,
    units: int,
    heads_per_unit: int,
    place: int,
    lists: int,
) -> Int[Array, "U 8"]:
    """All units of a list, items in order, heads innermost."""
    rows = jnp.asarray(work.row_start)[:, None] + jnp.arange(work.tile_rows)
    live = jnp.arange(work.tile_rows) < jnp.asarray(work.row_count)[:, None]
    reach = positions[jnp.where(live, rows, 0)] + 1
    # No row sees beyond the last one's position: early tiles of a prompt chunk stop there.
    last = jnp.where(live, reach, 0).max(axis=1)
    kv_stop = jnp.clip(last, jnp.asarray(work.kv_start), jnp.asarray(work.kv_stop))
    all_visible = jnp.where(live, reach, jnp.iinfo(jnp.int32).max).min(axis=1)
    item = [
        work.row_start,
        work.row_count,
        work.table_row,
        work.kv_start,
        kv_stop,
        jnp.minimum(all_visible, kv_stop),
        first_slot + jnp.arange(work.capacity) * work.tile_rows,
    ]
    fields = jnp.stack([jnp.asarray(field, jnp.int32) for field in item], axis=1)
    head = jnp.tile(jnp.arange(units, dtype=jnp.int32) * heads_per_unit, work.capacity)
    return jnp.concatenate(
        [jnp.repeat(fields, units, axis=0), (head * lists + place)[:, None]], axis=1
    )
