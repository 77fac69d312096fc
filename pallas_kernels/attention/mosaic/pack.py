"""Packs an AttentionPlan into the arrays that the kernel reads: plain XLA, fixed shapes."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rjax.pallas_kernels.attention.mosaic.config import WGMMA_M
from rjax.pallas_kernels.attention.mosaic.work_tile import KV_START, KV_STOP, WorkListShape
from rjax.pallas_kernels.attention.work_list import AttentionPlan, WorkList, merge_destinations
from rjax.pallas_kernels.mosaic_emit import num_sms

# KV tokens a CTA from which on each kind of work tile keeps it busy for long; measured on an H200,
# see bench/kernels/README.md.
_LONG_COOPERATIVE, _LONG_HEAD_PAIRS = 768, 1792


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernel reads it, for N query and K KV heads. Every layer of a step uses it.

    Attributes:
        work_tiles: records (``work_tile``) in the order of the schedule: cooperative ones first.
            Records from ``num_tiles`` on are zero.
        num_tiles: live work tiles.
        num_cooperative: live cooperative work tiles.
        reverse_odd_ctas: 1 if odd CTAs take their work tiles from the last to the first, else 0.
        destinations: where the result of each slot (item, row) goes: a merge entry, or -1 for the
            only result of its row, which goes to the output.
        merge_indptr: first merge entry of each row, and the end.
        num_merge_entries: capacity for merge entries.
        lists: static part of the work lists, the most rows an item first.
        heads: (N, K).
    """

    work_tiles: Int[Array, "U 8"]
    num_tiles: Int[Array, ""]
    num_cooperative: Int[Array, ""]
    reverse_odd_ctas: Int[Array, ""]
    destinations: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    num_merge_entries: int = dataclasses.field(metadata={"static": True})
    lists: tuple[WorkListShape, ...] = dataclasses.field(metadata={"static": True})
    heads: tuple[int, int] = dataclasses.field(metadata={"static": True})

    @property
    def schedule(self) -> Int[Array, "3"]:
        """Input of ``TileScheduler.of``."""
        return jnp.stack([self.num_tiles, self.num_cooperative, self.reverse_odd_ctas])


def pack_plan(
    plan: AttentionPlan, positions: Int[Array, " T"], heads: tuple[int, int] | None = None
) -> PackedPlan | AttentionPlan:
    """Expand the lists into work tiles, and invert the merge into destinations.

    ``heads`` is (N, K) of the model. Without it the plan comes back unchanged and each attention
    call packs it; inside one jit XLA computes that once for all layers.
    """
    if heads is None:
        return plan
    N, K = heads
    order = sorted(range(len(plan.lists)), key=lambda i: -plan.lists[i].tile_rows)
    lists, blocks, counts = [], [], []
    for index, i in enumerate(order):
        work = plan.lists[i]
        first_slot = sum(w.capacity * w.tile_rows for w in plan.lists[:i])
        cooperative = work.tile_rows * (N // K) > WGMMA_M
        tile_heads = 1 if cooperative else 2
        layout = _ListLayout(index, len(order), first_slot, tile_heads, -(-K // tile_heads))
        lists.append(WorkListShape(work.tile_rows, cooperative))
        blocks.append(_work_tiles(work, positions, layout))
        counts.append(jnp.asarray(work.num_items, jnp.int32) * layout.item_tiles)
    work_tiles, starts = _compact(blocks, counts)
    num_cooperative = starts[sum(work.cooperative for work in lists)]
    destinations, indptr = merge_destinations(plan)
    return PackedPlan(
        work_tiles=work_tiles,
        num_tiles=starts[-1],
        num_cooperative=num_cooperative,
        reverse_odd_ctas=_reverse_odd_ctas(work_tiles, num_cooperative, lists),
        destinations=destinations,
        merge_indptr=indptr,
        num_merge_entries=plan.merge_slots.shape[0],
        lists=tuple(lists),
        heads=heads,
    )


def _compact(
    blocks: list[Int[Array, "_ 8"]], counts: list[Int[Array, ""]]
) -> tuple[Int[Array, "U 8"], Int[Array, " L1"]]:
    """The live records of all lists one after another, and where each list starts."""
    starts = jnp.cumsum(jnp.stack([jnp.int32(0), *counts]))
    capacity = sum(block.shape[0] for block in blocks)
    place = jnp.arange(capacity, dtype=jnp.int32)
    source, base = jnp.zeros_like(place), 0
    for which, block in enumerate(blocks):
        source = jnp.where(place >= starts[which], base + place - starts[which], source)
        base += block.shape[0]
    records = jnp.concatenate(blocks)[jnp.clip(source, 0, capacity - 1)]
    return jnp.where((place < starts[-1])[:, None], records, 0), starts


def _reverse_odd_ctas(
    work_tiles: Int[Array, "U 8"], num_cooperative: Int[Array, ""], lists: list[WorkListShape]
) -> Int[Array, ""]:
    """1 where both kinds of work tiles keep a CTA busy for long.

    Cooperative work tiles are bound by compute and head pairs by memory, so they run best side by
    side. Where one kind is soon done, all CTAs do better to end with the head pairs: these load
    while the last cooperative work tiles compute, and all CTAs end together.
    """
    if len({work.cooperative for work in lists}) == 1:
        return jnp.int32(0)
    tokens = (work_tiles[:, KV_STOP] - work_tiles[:, KV_START]).astype(jnp.float32)
    cooperative = jnp.where(jnp.arange(tokens.size) < num_cooperative, tokens, 0).sum()
    paired = tokens.sum() - cooperative
    ctas = num_sms()
    both = (cooperative >= _LONG_COOPERATIVE * ctas) & (paired >= _LONG_HEAD_PAIRS * ctas)
    return both.astype(jnp.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class _ListLayout:
    """Static description of the work tiles of one work list.

    Attributes:
        index, num_lists: the list's index in ``PackedPlan.lists``, and the number of lists.
        first_slot: result slot of its first row.
        tile_heads: KV heads of a work tile.
        item_tiles: work tiles of an item.
    """

    index: int
    num_lists: int
    first_slot: int
    tile_heads: int
    item_tiles: int


def _work_tiles(
    work: WorkList, positions: Int[Array, " T"], layout: _ListLayout
) -> Int[Array, "U 8"]:
    """All records of a list, items in order, heads innermost."""
    rows = jnp.asarray(work.row_start)[:, None] + jnp.arange(work.tile_rows)
    live = jnp.arange(work.tile_rows) < jnp.asarray(work.row_count)[:, None]
    visible_stop = positions[jnp.where(live, rows, 0)] + 1
    # No row sees beyond the last row's position: early tiles of a prompt chunk stop there.
    last = jnp.where(live, visible_stop, 0).max(axis=1)
    kv_stop = jnp.clip(last, jnp.asarray(work.kv_start), jnp.asarray(work.kv_stop))
    unmasked_stop = jnp.where(live, visible_stop, jnp.iinfo(jnp.int32).max).min(axis=1)
    item = [
        work.row_start,
        work.row_count,
        work.table_row,
        work.kv_start,
        kv_stop,
        jnp.minimum(unmasked_stop, kv_stop),
        layout.first_slot + jnp.arange(work.capacity) * work.tile_rows,
    ]
    fields = jnp.stack([jnp.asarray(field, jnp.int32) for field in item], axis=1)
    heads = jnp.arange(layout.item_tiles, dtype=jnp.int32) * layout.tile_heads
    head = jnp.tile(heads, work.capacity)
    return jnp.concatenate(
        [
            jnp.repeat(fields, layout.item_tiles, axis=0),
            (head * layout.num_lists + layout.index)[:, None],
        ],
        axis=1,
    )
