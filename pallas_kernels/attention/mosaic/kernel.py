"""The Mosaic GPU work-list kernel (Hopper): TMA a page, wgmma, warp-specialised, persistent.

One program (CTA) takes every ``grid``-th unit of work until none is left (``order``). A unit is
  - wide (an item whose rows fill more than 64 matrix rows): one KV head, 128 query rows, KV steps
    of 128 tokens that both consumer warpgroups read, each for its own 64 rows;
  - paired (an item of at most 64 matrix rows): two KV heads, KV steps of 64 tokens, one consumer
    warpgroup a head. Of items of one row the heads are the tensor cores' columns (``row_unit``),
    where there are at most 16 a KV head.
A slot of the ring holds two [64, H] tiles of K or two of V: a wide step's, or one of each head. One
producer warpgroup streams them through a ring in shared memory and runs ahead over unit boundaries,
so that memory never waits for a unit to end. Bytes moved: each item's K and V once
(2 * tokens * K * H * 2; they leave the L2 cache first, but those of wide items in steps of many
rows, where many items read the same), its queries once, and the results of its live rows once. Rows
that are padding are computed and dropped.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.alibi import gather_heads
from pallas_kernels.attention.mosaic.columns import gather_columns
from pallas_kernels.attention.mosaic.config import (
    CONSUMERS,
    FEW_READERS,
    ROWS,
    TILE,
    KernelConfig,
    query_box,
)
from pallas_kernels.attention.mosaic.fp8 import ByteTiles, PageScales, split_queries
from pallas_kernels.attention.mosaic.order import Turns
from pallas_kernels.attention.mosaic.pack import (
    FIELDS,
    HEAD_AND_LIST,
    KV_START,
    KV_STOP,
    ROW,
    ROWS_LIVE,
    SLOT,
    TABLE_ROW,
    ListShape,
)
from pallas_kernels.attention.mosaic.quads import load_tile
from pallas_kernels.attention.mosaic.ring import Ring
from pallas_kernels.attention.mosaic.row_place import RowPlace
from pallas_kernels.attention.mosaic.row_unit import attend_row, finish_row
from pallas_kernels.attention.mosaic.softmax import finish
from pallas_kernels.attention.mosaic.stores import gather_rows
from pallas_kernels.attention.mosaic.tile_loads import TileLoads
from pallas_kernels.attention.mosaic.unit import attend


def make_body(
    cfg: KernelConfig,
    lists: tuple[ListShape, ...],
    T: int,
    N: int,
    K: int,
    S: int,
    H: int,
    names: tuple[str, ...],
    columns: int,
):
    G = N // K
    buffers = cfg.query_buffers
    fp8 = "k_scales" in names
    any_wide = any(work.wide for work in lists)
    any_pair = any(not work.wide for work in lists)
    of_one_row = tuple(columns > 0 and work.tile_rows == 1 for work in lists)
    pairs_of_rows = any(
        not work.wide and not row for work, row in zip(lists, of_one_row, strict=True)
    )

    def either(condition, some: bool, others: bool, run):
        """``run(is_some)`` with a static bool: one copy of the code for each kind there is."""
        if some != others:
            return run(some)
        return lax.cond(condition, lambda: run(True), lambda: run(False))

    def attention_kernel(
        units,
        order,
        dest,
        table,
        positions,
        q,
        k_pages,
        v_pages,
        *rest,
        q_smem,
        kv_views,
        q_full,
        q_free,
        full,
        free,
        turn,
        scratch=None,
    ):
        """GMEM: units int32 [U, 8], order int32 [3] (live units, wide ones, and whether every
        second program takes its own backwards), dest int32 [Y], table int32 [B, M], positions
        int32 [T], q [T, K, G, H], pages [P, K, S, H]; rest: the arrays of ``names``, out [T, N, H],
        lse [T, N], part [X, N, H], part_lse [X, N]. SMEM: q_smem [buffers * 2, 64, H] and its other
        views, kv_views [ring, 2, 64, H] and [ring, 128, H], scratch [2, 64, H]. Barriers: all
        others.
        """
        *numbers, out, lse, part, part_lse = rest
        numbers = dict(zip(names, numbers, strict=True))
        if cfg.early_launch:
            plgpu.griddepcontrol_wait()
        plain_queries, kv_smem = q_smem[0], kv_views[0]
        ring = Ring(kv_smem, kv_views[1], full, free, cfg.ring)
        wg = lax.axis_index("wg")
        program = lax.axis_index("program")

        turns = Turns.of(program, cfg.programs, order, any_wide and any_pair)

        def fetch(number):
            """A unit's record; read one unit ahead, so that nobody waits for it."""
            place = jnp.minimum(turns.unit(number), units.shape[0] - 1)
            return tuple(units[place, field] for field in range(FIELDS))

        def each_unit(run):
            """``run(record, buffer, tile)`` over this program's units.

            ``buffer`` is where its queries lie, ``tile`` counts ring slots used.
            """
            first = fetch(jnp.int32(0))

            def step(number, carry):
                tile, record = carry
                following = fetch(number + 1)
                return run(record, lax.rem(number, jnp.int32(buffers)), tile), following

            lax.fori_loop(0, turns.count, step, (jnp.int32(0), first))

        def decode(record):
            """(first head, is wide, rows of a wide item's first half, list, steps)."""
            code = record[HEAD_AND_LIST]
            head = lax.div(code, jnp.int32(len(lists)))
            which = code - head * len(lists)
            wide, half = jnp.bool_(any_wide), jnp.int32(0)
            for place, work in enumerate(lists):
                wide = jnp.where(which == place, work.wide, wide)
                half = jnp.where(which == place, work.half_rows, half)
            tokens = jnp.where(wide, 2 * TILE, TILE)
            steps = lax.div(record[KV_STOP] - record[KV_START] + tokens - 1, tokens)
            return head, wide, half, which, steps

        @pl.when(wg == CONSUMERS)
        def _producer():
            plgpu.set_max_registers(40, action="decrease")

            def produce(record, buffer, tile):
                head, is_wide, _, which, steps = decode(record)
                plgpu.barrier_wait(q_free.at[buffer])

                def load_queries(work: ListShape):
                    box = query_box(min(work.half_rows, T), G, H)
                    for w in range(CONSUMERS):
                        first = record[ROW] + (w * work.half_rows if work.wide else 0)
                        own = head if work.wide else jnp.minimum(head + w, K - 1)
                        place = buffer * CONSUMERS + w
                        target = plain_queries.at[place, pl.ds(0, box * G)].reshape(box, G, H)
                        source = q.at[pl.ds(first, box), own]
                        plgpu.copy_gmem_to_smem(source, target, q_full.at[place])

                for place, work in enumerate(lists):
                    if len(lists) == 1:
                        load_queries(work)
                    else:
                        pl.when(which == place)(lambda work=work: load_queries(work))

                def run(wide: bool):
                    leave = T <= FEW_READERS or not wide
                    pools = (k_pages, v_pages)
                    TileLoads(record, pools, table, head, wide, leave).run(ring, tile, steps)

                either(is_wide, any_wide, any_pair, run)
                return tile + 2 * steps

            each_unit(produce)

        @pl.when(wg < CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(232, action="increase")
            for buffer in range(buffers):
                plgpu.barrier_arrive(q_free.at[buffer])
            for slot in range(cfg.ring):
                plgpu.barrier_arrive(free.at[slot])

            def consume(record, buffer, tile):
                head, is_wide, half, which, steps = decode(record)
                place = buffer * CONSUMERS + wg
                kv_head = jnp.where(is_wide, head, jnp.minimum(head + wg, K - 1))
                value_unit = None
                if fp8 and len(numbers["v_scales"].shape) == 1:
                    value_unit = numbers["v_scales"][kv_head]

                def byte_tiles(units) -> ByteTiles:
                    """units: of the queries."""
                    last = lax.div(record[KV_STOP] - 1, jnp.int32(S))
                    pages = (table, record[TABLE_ROW], kv_head, last, S)
                    keys, values = (numbers[name] for name in ("k_scales", "v_scales"))
                    return ByteTiles(
                        units * keys[kv_head] if len(keys.shape) == 1 else units,
                        scratch.at[wg],  # pyright: ignore[reportOptionalMemberAccess]
                        PageScales(keys, *pages) if len(keys.shape) == 2 else None,
                        PageScales(values, *pages) if len(values.shape) == 2 else None,
                    )

                plgpu.barrier_wait(q_full.at[place])
                source = plain_queries.at[place, pl.ds(0, ROWS)]
                targets = (out, lse, part, part_lse)

                def one_row():
                    first = 1 if all(of_one_row) else 2
                    tiles, weights = (q_smem[first + n].at[place] for n in range(2))
                    item = k_pages.dtype.itemsize
                    queries = RowPlace(source, tiles, weights, columns, H, item)
                    queries.stage()
                    plgpu.commit_smem()
                    slopes = None
                    narrow = byte_tiles(queries.units()) if fp8 else None
                    if "alibi_slopes" in numbers:
                        slopes = gather_columns(numbers["alibi_slopes"], kv_head * G, columns)
                    row = record[ROW]
                    entry = dest[record[SLOT]]  # long before it is needed
                    state = attend_row(
                        cfg,
                        queries,
                        ring,
                        tile,
                        wg,
                        steps,
                        record,
                        positions[row],
                        slopes,
                        narrow,
                    )
                    # All warps have read the place, and what they wrote there is done.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(q_free.at[buffer])
                    alive = jnp.where(head + wg < K, record[ROWS_LIVE], 0)
                    finish_row(state, targets, entry, row, kv_head * G, alive, G, value_unit)

                def many_rows():
                    # Only the loop over tokens is there twice: in a whole step, code is cold.
                    # The second warpgroup takes the second half of a wide item's rows, or the
                    # second head.
                    shift = jnp.where(is_wide, wg * half, 0)
                    own_head = jnp.where(is_wide, head, head + wg)
                    rows = record[ROWS_LIVE]
                    live = jnp.where(is_wide, jnp.clip(rows - shift, 0, half), rows)
                    live = jnp.where(own_head < K, live, 0)
                    known = jnp.maximum(live, 1)  # without live rows, look at the last one
                    first = record[ROW] + jnp.minimum(shift, rows - 1)
                    reach = gather_rows(positions, first, known, G)
                    target = gather_rows(dest, record[SLOT] + shift, known, G)
                    narrow = None
                    if fp8:
                        queries, units = split_queries(source)
                        narrow = byte_tiles(units)
                    else:
                        queries = (load_tile(source, known * G, H, q.dtype),)
                    # The same memory, as the tensor cores read it.
                    plgpu.commit_smem()
                    for i, some in enumerate(queries):
                        q_smem[1].at[place, i, pl.ds(0, ROWS)][...] = some
                    plgpu.commit_smem()
                    slopes = None
                    if "alibi_slopes" in numbers:
                        slopes = gather_heads(numbers["alibi_slopes"], own_head * G, G)

                    def run(wide: bool):
                        return attend(
                            cfg,
                            q_smem[1],
                            place,
                            q_free.at[buffer],
                            ring,
                            tile,
                            (jnp.int32(0), jnp.int32(1)) if wide else (wg,),
                            wg,
                            turn if wide and cfg.ping_pong else None,
                            steps,
                            record,
                            reach,
                            slopes,
                            narrow,
                        )

                    state = either(is_wide, any_wide, pairs_of_rows, run)
                    row = record[ROW] + shift
                    finish(state, targets, target, row, own_head * G, live, G, value_unit)

                is_row = jnp.bool_(False)
                for number, row in enumerate(of_one_row):
                    is_row = is_row | (which == number) if row else is_row
                some, others = any(of_one_row), not all(of_one_row)
                either(is_row, some, others, lambda row: one_row() if row else many_rows())
                return tile + 2 * steps

            each_unit(consume)

    return attention_kernel
