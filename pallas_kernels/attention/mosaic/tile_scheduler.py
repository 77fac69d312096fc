"""Work tiles, the plan that lists them and the tile scheduler that deals them to the CTAs.

A work tile is what one CTA computes between two turns of the scheduler: one item of a work list on
one or two KV heads. There are three kinds:
  - cooperative: the item has more than 64 matrix rows (query rows times heads of a group). Both
    consumer warpgroups work on one KV head, 64 matrix rows each, in KV steps of 128 tokens that
    both read.
  - head pair: the item has at most 64 matrix rows. Each consumer warpgroup works on a KV head of
    its own, in KV steps of 64 tokens.
  - split head: every work tile where heads have more than 256 dims. The item has at most 64 matrix
    rows. Both consumer warpgroups work on one KV head and on all rows, in KV steps of 64 tokens:
    each computes all scores and half of the output's dims.
``pack_plan`` writes a record of each work tile once a step, in plain XLA of fixed shapes: int32 [8]
in GMEM, one 32-byte sector. On the device ``TileScheduler`` picks the records of a CTA, which reads
int32 [3] from GMEM for that, and ``WorkTile.decode`` reads them. The tests run the scheduler in
plain JAX.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M, split_head_parts
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan, WorkList, merge_destinations
from rjax.pallas_kernels.mosaic.emit import num_sms

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
    """Static part of one work list: rows of an item, and whether its work tiles are cooperative."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class TileScheduler:
    """The work tiles of one CTA: a static persistent schedule.

    CTA c of n takes work tiles c, c + n, c + 2 * n, ... of the packed plan, whose cooperative work
    tiles come first. Two rules change that order:
      - A last round that is not full and holds head-pair tiles only goes to the last CTAs, because
        the first CTAs have the longer cooperative tiles.
      - Where the plan asks for it, odd CTAs take their work tiles from the last to the first, so
        that cooperative tiles (bound by compute) run beside head-pair tiles (bound by memory).

    Attributes:
        cta: int32, index of the CTA.
        num_ctas: static, number of CTAs.
        full_rounds: int32, rounds in which every CTA has a work tile.
        last_round_cta: int32, place of this CTA in the last round.
        num_tiles: int32, work tiles of this CTA.
        backwards: bool, whether it takes them from the last to the first; None where no plan of
            these shapes asks for that.
    """

    cta: Any
    num_ctas: int
    full_rounds: Any
    last_round_cta: Any
    num_tiles: Any
    backwards: Any

    @classmethod
    def of(cls, cta, num_ctas: int, schedule: Any, can_reverse: bool) -> "TileScheduler":
        """The scheduler of one CTA.

        Args:
            schedule: int32 [3], ``PackedPlan.schedule``: work tiles, cooperative work tiles, and 1
                if odd CTAs go backwards.
            can_reverse: static; False ignores the last of these.
        """
        rounds, rest = (f(schedule[0], jnp.int32(num_ctas)) for f in (lax.div, lax.rem))
        last = jnp.where(schedule[0] - rest >= schedule[1], num_ctas - 1 - cta, cta)
        num_tiles = rounds + (last < rest).astype(jnp.int32)
        backwards = (lax.rem(cta, 2) == 1) & (schedule[2] != 0) if can_reverse else None
        return cls(cta, num_ctas, rounds, last, num_tiles, backwards)

    def tile_index(self, number):
        """Index of this CTA's work tile ``number`` in the packed plan.

        From ``num_tiles`` on the index is meaningless and may lie behind the last work tile.
        """
        if self.backwards is not None:
            number = jnp.where(self.backwards, jnp.maximum(self.num_tiles - 1 - number, 0), number)
        place = jnp.where(number < self.full_rounds, self.cta, self.last_round_cta)
        return place + number * self.num_ctas


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedPlan:
    """A plan as the kernel reads it, for N query and K KV heads. Every layer of a step uses it.

    Attributes:
        work_tiles: records of ``WorkTile`` in the order of the schedule: cooperative ones first.
            Records from ``num_tiles`` on are zero.
        num_tiles: live work tiles.
        num_cooperative: live cooperative work tiles.
        reverse_odd_ctas: 1 if odd CTAs take their work tiles from the last to the first, else 0.
        destinations: where the result of each slot (item, row) goes: a merge entry, or -1 for the
            only result of its row, which goes to the output.
        merge_indptr: first merge entry of each row, and the end.
        num_merge_entries: capacity for merge entries.
        lists: static part of the work lists, the most rows an item first.
        heads: (N, K, H).
    """

    work_tiles: Int[Array, "U 8"]
    num_tiles: Int[Array, ""]
    num_cooperative: Int[Array, ""]
    reverse_odd_ctas: Int[Array, ""]
    destinations: Int[Array, " Y"]
    merge_indptr: Int[Array, " T1"]
    num_merge_entries: int = dataclasses.field(metadata={"static": True})
    lists: tuple[WorkListShape, ...] = dataclasses.field(metadata={"static": True})
    heads: tuple[int, int, int] = dataclasses.field(metadata={"static": True})

    @property
    def schedule(self) -> Int[Array, "3"]:
        """Input of ``TileScheduler.of``."""
        return jnp.stack([self.num_tiles, self.num_cooperative, self.reverse_odd_ctas])


def pack_plan(
    plan: AttentionPlan, positions: Int[Array, " T"], heads: tuple[int, int, int] | None = None
) -> PackedPlan | AttentionPlan:
    """Expand the lists into work tiles, and invert the merge into destinations.

    ``heads`` is (N, K, H) of the model. Without it the plan comes back unchanged and each attention
    call packs it; inside one jit XLA computes that once for all layers.
    """
    if heads is None:
        return plan
    N, K, H = heads
    split_head = split_head_parts(H) > 1
    order = sorted(range(len(plan.lists)), key=lambda i: -plan.lists[i].tile_rows)
    lists, blocks, counts = [], [], []
    for index, i in enumerate(order):
        work = plan.lists[i]
        first_slot = sum(w.capacity * w.tile_rows for w in plan.lists[:i])
        cooperative = work.tile_rows * (N // K) > WGMMA_M and not split_head
        tile_heads = 1 if cooperative or split_head else 2
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


# KV tokens a CTA from which on each kind of work tile keeps it busy for long; measured on an H200,
# see bench/kernels/README.md.
_LONG_COOPERATIVE, _LONG_HEAD_PAIRS = 768, 1792


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
