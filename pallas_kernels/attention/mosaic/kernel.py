"""The Mosaic GPU work-list kernel (Hopper): TMA a page, wgmma, warp-specialised, persistent.

One program (CTA) takes every ``grid``-th unit of work until none is left. A unit is
  - wide (an item whose rows fill more than 64 matrix rows): one KV head, 128 query rows, KV steps
    of 128 tokens that both consumer warpgroups read, each for its own 64 rows;
  - paired (an item of at most 64 matrix rows, a single sequence's included): two KV heads, KV
    steps of 64 tokens, one consumer warpgroup a head.
Either way a step is two [64, H] tiles of K and two of V. One producer warpgroup streams them through
a ring in shared memory and runs ahead over unit boundaries, so that memory never waits for a unit to
end. Bytes moved: each item's K and V once (2 * tokens * K * H * 2), its queries once, and the
results of its live rows once. Rows that are padding are computed and dropped.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.stores import (
    ROWS,
    gather_rows,
    store_row_scalars,
    store_rows,
)

TILE = 64  # tokens of one K or V tile
_CONSUMERS = 2
_SMEM_BYTES = 232_448 - 2048  # what a Hopper block may take, less room for barriers
_LOWEST = -1e30  # finite, so that rows that have seen nothing yet stay free of NaN
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, slots=True)
class ListConfig:
    """The static part of one work list: rows an item, items that fit, first item, first slot."""

    tile_rows: int
    capacity: int
    first_item: int
    first_slot: int
    wide: bool


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """Everything the compiled kernel depends on besides array shapes."""

    lists: tuple[ListConfig, ...]
    scale: float
    sliding_window: int | None
    programs: int
    ring: int
    ping_pong: bool = False


def ring_slots(head_dim: int, itemsize: int) -> int:
    """Slots (two tiles each) that fit in shared memory beside the queries."""
    slot = _CONSUMERS * TILE * head_dim * itemsize
    return (_SMEM_BYTES - slot) // slot


def attention_call(cfg: KernelConfig, packed, page_table, positions, q, k_pages, v_pages):
    """Launch the kernel. Returns (out [T, N, H], lse [T, N], part [X, N, H], part_lse [X, N]).

    Only rows with a single result are written to the first two, only the others to the last two.
    """
    T, N, H = q.shape
    _, K, S, _ = k_pages.shape
    entries = max(1, packed.entries)
    swizzle = plgpu.find_swizzle(H * 16)
    tiled = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    copies = _CONSUMERS * max(1, TILE // S)
    kernel = plgpu.kernel(
        _make_body(cfg, T, N, K, S, H),
        out_type=(
            jax.ShapeDtypeStruct((T, N, H), q.dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((entries, N, H), q.dtype),
            jax.ShapeDtypeStruct((entries, N), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=plgpu.SMEM((_CONSUMERS, ROWS, H), q.dtype),
            kv_smem=plgpu.SMEM((cfg.ring, _CONSUMERS, TILE, H), k_pages.dtype, transforms=tiled),
            q_full=plgpu.Barrier(num_barriers=_CONSUMERS),
            q_free=plgpu.Barrier(num_arrivals=_CONSUMERS),
            full=plgpu.Barrier(num_barriers=cfg.ring, num_arrivals=copies),
            free=plgpu.Barrier(num_barriers=cfg.ring, num_arrivals=_CONSUMERS),
            turn=plgpu.Barrier(num_arrivals=_CONSUMERS),
        ),
        grid=(cfg.programs,),
        grid_names=("program",),
        num_threads=_CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    q4 = q.reshape(T, K, N // K, H)
    return kernel(
        packed.items, packed.counts, packed.dest, page_table, positions, q4, k_pages, v_pages
    )


def _make_body(cfg: KernelConfig, T: int, N: int, K: int, S: int, H: int):
    G = N // K
    pairs = math.ceil(K / 2)
    chunk = min(S, TILE)  # tokens of one TMA copy
    factor = cfg.scale * math.log2(math.e)

    def body(
        items,
        counts,
        dest,
        table,
        positions,
        q,
        k_pages,
        v_pages,
        out,
        lse,
        part,
        part_lse,
        *,
        q_smem,
        kv_smem,
        q_full,
        q_free,
        full,
        free,
        turn,
    ):
        wg = lax.axis_index("wg")
        program = lax.axis_index("program")
        spans = []  # units before the end of each list, in the order they are taken
        total = jnp.int32(0)
        order = sorted(range(len(cfg.lists)), key=lambda i: -cfg.lists[i].tile_rows)
        for i in order:
            units = counts[i] * (K if cfg.lists[i].wide else pairs)
            spans.append((i, total))
            total = total + units
        mine = lax.div(total - program + (cfg.programs - 1), jnp.int32(cfg.programs))

        def unit(number):
            """Decode a unit: its list's place in ``order``, item fields, first head, first slot."""
            u = program + number * cfg.programs
            which = jnp.int32(0)
            item = head = slot0 = jnp.int32(0)
            for place, (i, start) in enumerate(spans):
                lst = cfg.lists[i]
                heads = K if lst.wide else pairs
                local = u - start
                index = lax.div(local, jnp.int32(heads))
                first_head = (local - index * heads) * (1 if lst.wide else 2)
                here = u >= start
                which = jnp.where(here, place, which)
                item = jnp.where(here, lst.first_item + index, item)
                head = jnp.where(here, first_head, head)
                slot0 = jnp.where(here, lst.first_slot + index * lst.tile_rows, slot0)
            return which, item, head, slot0

        def by_list(which, run):
            """Run ``run(list, is_wide)`` for the unit's list: one static copy of code a list."""
            for place, (i, _) in enumerate(spans):
                if len(spans) == 1:
                    run(cfg.lists[i])
                else:
                    pl.when(which == place)(lambda i=i: run(cfg.lists[i]))

        any_wide = any(lst.wide for lst in cfg.lists)
        any_pair = any(not lst.wide for lst in cfg.lists)

        def step_tokens(which):
            if not any_wide:
                return jnp.int32(TILE)
            if not any_pair:
                return jnp.int32(2 * TILE)
            tokens = jnp.int32(0)
            for place, (i, _) in enumerate(spans):
                size = 2 * TILE if cfg.lists[i].wide else TILE
                tokens = jnp.where(which == place, size, tokens)
            return tokens

        @pl.when(wg == _CONSUMERS)
        def _producer():
            plgpu.set_max_registers(56, action="decrease")

            def produce(number, tile):
                which, item, head, _ = unit(number)
                row0 = items[item, 0]
                table_row = items[item, 2]
                start = items[item, 3]
                stop = items[item, 4]
                tokens = step_tokens(which)
                steps = lax.div(stop - start + tokens - 1, tokens)
                last_page = lax.div(stop - 1, jnp.int32(S))
                plgpu.barrier_wait(q_free)

                def load_queries(lst):
                    rows = -(-lst.tile_rows // 2) if lst.wide else lst.tile_rows
                    box = min(rows, T)
                    for w in range(_CONSUMERS):
                        first = row0 + (w * rows if lst.wide else 0)
                        own = head if lst.wide else jnp.minimum(head + w, K - 1)
                        target = q_smem.at[w, pl.ds(0, box * G)].reshape(box, G, H)
                        plgpu.copy_gmem_to_smem(
                            q.at[pl.ds(first, box), own], target, q_full.at[w]
                        )

                by_list(which, load_queries)

                def tiles(pool, slot, base, wide: bool):
                    """Two tiles into one ring slot: two runs of 64 tokens, or two heads."""
                    for w in range(_CONSUMERS):
                        own = head if wide else jnp.minimum(head + w, K - 1)
                        for c in range(TILE // chunk):
                            at = base + (w * TILE if wide else 0) + c * chunk
                            index = jnp.minimum(lax.div(at, jnp.int32(S)), last_page)
                            page = table[table_row, index]
                            if chunk == S:
                                source = pool.at[page, own]
                            else:
                                offset = pl.multiple_of(lax.rem(at, jnp.int32(S)), chunk)
                                source = pool.at[page, own, pl.ds(offset, chunk)]
                            plgpu.copy_gmem_to_smem(
                                source,
                                kv_smem.at[slot, w, pl.ds(c * chunk, chunk)],
                                full.at[slot],
                            )

                def step(i, tile, wide: bool):
                    base = start + i * (2 * TILE if wide else TILE)
                    for pool in (k_pages, v_pages):
                        slot = lax.rem(tile, jnp.int32(cfg.ring))
                        plgpu.barrier_wait(free.at[slot])
                        tiles(pool, slot, base, wide)
                        tile = tile + 1
                    return tile

                if any_wide and any_pair:
                    is_wide = tokens == 2 * TILE

                    @pl.when(is_wide)
                    def _():
                        lax.fori_loop(0, steps, lambda i, t: step(i, t, True), tile)

                    @pl.when(jnp.logical_not(is_wide))
                    def _():
                        lax.fori_loop(0, steps, lambda i, t: step(i, t, False), tile)
                else:
                    lax.fori_loop(0, steps, lambda i, t: step(i, t, any_wide), tile)
                return tile + 2 * steps

            lax.fori_loop(0, mine, produce, jnp.int32(0))

        @pl.when(wg < _CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(224, action="increase")
            plgpu.barrier_arrive(q_free)
            for slot in range(cfg.ring):
                plgpu.barrier_arrive(free.at[slot])
            if cfg.ping_pong and any_wide:
                pl.when(wg == 1)(lambda: _hand_over(turn))

            def consume(number, tile):
                which, item, head, slot0 = unit(number)
                row0 = items[item, 0]
                row_count = items[item, 1]
                start = items[item, 3]
                stop = items[item, 4]
                full_stop = items[item, 5]
                tokens = step_tokens(which)
                steps = lax.div(stop - start + tokens - 1, tokens)
                done = tile + 2 * steps

                def run(lst):
                    rows = -(-lst.tile_rows // 2) if lst.wide else lst.tile_rows
                    shift = wg * rows if lst.wide else jnp.int32(0)
                    live = jnp.clip(row_count - shift, 0, rows)
                    known = jnp.maximum(live, 1)  # a tile with no live row reads its first one
                    reach = gather_rows(positions, row0 + jnp.minimum(shift, row_count - 1), known, G)
                    target = gather_rows(dest, slot0 + shift, known, G)
                    size = 2 * TILE if lst.wide else TILE
                    plgpu.barrier_wait(q_full.at[wg])
                    queries = plgpu.load(q_smem.at[wg], layout=_WGMMA, optimized=False)
                    plgpu.barrier_arrive(q_free)
                    state = _attend(
                        cfg,
                        queries,
                        kv_smem,
                        full,
                        free,
                        turn if lst.wide and cfg.ping_pong else None,
                        factor,
                        # A wide step is two tiles for both warpgroups, a paired one a tile each.
                        (jnp.int32(0), jnp.int32(1)) if lst.wide else (wg,),
                        tile,
                        start,
                        steps,
                        stop,
                        full_stop,
                        reach,
                        size,
                    )
                    _finish(
                        state,
                        out,
                        lse,
                        part,
                        part_lse,
                        target,
                        row0 + shift,
                        head if lst.wide else head + wg,
                        live if lst.wide else jnp.where(head + wg < K, live, 0),
                        G,
                    )

                by_list(which, run)
                return done

            lax.fori_loop(0, mine, consume, jnp.int32(0))
            if cfg.ping_pong and any_wide:
                pl.when(wg == 0)(lambda: _hand_over(turn))

    return body


def _hand_over(turn):
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _attend(
    cfg, queries, kv_smem, full, free, turn, factor, halves, tile, start, steps, stop, full_stop,
    reach, size,
):
    """Online softmax over the unit's steps. Returns (acc [64, H], top [64], total [64]), float32.

    queries: [64, H] registers. kv_smem: [ring, 2, 64, H]. ``top`` is in units of log2.
    """
    H = queries.shape[1]
    ring = jnp.int32(cfg.ring)
    limit = jnp.minimum(reach + 1, stop)
    columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=_WGMMA)

    def step(i, carry, masked: bool):
        acc, top, total = carry
        k_slot = lax.rem(tile + 2 * i, ring)
        v_slot = lax.rem(tile + 2 * i + 1, ring)
        plgpu.barrier_wait(full.at[k_slot])

        def scores_of(*refs):
            for ref, half in zip(refs, halves, strict=True):
                plgpu.wgmma(ref, queries, kv_smem.at[k_slot, half].transpose((1, 0)))
            if turn is not None:
                _hand_over(turn)
            return tuple(ref[...] for ref in refs)

        scores = pl.run_scoped(
            scores_of, *(plgpu.ACC((ROWS, TILE), jnp.float32) for _ in halves)
        )
        plgpu.barrier_arrive(free.at[k_slot])
        if masked:
            scores = tuple(
                _mask(s, columns, start + i * size + n * TILE, limit, reach, cfg.sliding_window)
                for n, s in enumerate(scores)
            )
        peak = top
        for s in scores:
            peak = jnp.maximum(peak, s.max(axis=1) * factor)
        fade = jnp.exp2(top - peak)
        wide_peak = lax.broadcast_in_dim(peak, (ROWS, TILE), [0])
        weights = tuple(jnp.exp2(s * factor - wide_peak) for s in scores)
        total = total * fade
        acc = acc * lax.broadcast_in_dim(fade, (ROWS, H), [0])
        weights16 = tuple(w.astype(kv_smem.dtype) for w in weights)
        for w in weights:
            total = total + w.sum(axis=1)
        if turn is not None:
            acc, total, peak, weights16 = lax.optimization_barrier(
                (acc, total, peak, weights16)
            )
            plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(full.at[v_slot])
        if turn is not None:
            plgpu.barrier_wait(turn)
        if masked:
            for n, half in enumerate(halves):
                _clear_tail(kv_smem, v_slot, half, stop - (start + i * size + n * TILE))

        def weigh(ref):
            for w, half in zip(weights16, halves, strict=True):
                plgpu.wgmma(ref, w, kv_smem.at[v_slot, half])

        acc = pl.run_state(weigh)(plgpu.ACC.init(acc))
        plgpu.barrier_arrive(free.at[v_slot])
        return acc, peak, total

    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
    )
    plain = jnp.int32(0)
    if cfg.sliding_window is None:
        plain = lax.div(jnp.maximum(full_stop - start, 0), jnp.int32(size))
        carry = lax.fori_loop(0, plain, lambda i, c: step(i, c, False), carry)
    return lax.fori_loop(plain, steps, lambda i, c: step(i, c, True), carry)


def _mask(scores, columns, first, limit, reach, window):
    """-inf where the key at ``first + column`` is not below the row's limit, or left its window."""
    wide = lambda x: lax.broadcast_in_dim(x, scores.shape, [0])  # noqa: E731
    seen = columns < wide(limit - first)
    if window is not None:
        seen = seen & (columns > wide(reach - window - first))
    return jnp.where(seen, scores, -jnp.inf)


def _clear_tail(kv_smem, slot, half, used):
    """Zero the V rows from ``used`` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(used < TILE)
    def _():
        tile = kv_smem.at[slot, half]
        value = plgpu.layout_cast(tile[...], _WGMMA)
        rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA)
        tile[...] = jnp.where(rows < used, value, jnp.zeros_like(value))
        plgpu.commit_smem()


def _finish(state, out, lse, part, part_lse, target, row0, head, live, G: int):
    acc, top, total = state
    empty = total == 0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    value = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(out.dtype)
    log_sum = jnp.log(jnp.where(empty, 1.0, total)) + top * math.log(2.0)
    log_sum = jnp.where(empty, -jnp.inf, log_sum)
    # A head group starts at head * G of the N heads.
    store_rows(out, part, value, target, row0, head * G, live, G)
    store_row_scalars(lse, part_lse, log_sum, target, row0, head * G, live, G)
