"""Online softmax over the tiles of one unit, and the writing of its result."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic.alibi import add_distance
from pallas_kernels.attention.mosaic.config import ROWS, TILE, KernelConfig, queries_in_registers
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.pack import ALL_VISIBLE, KV_START, KV_STOP
from pallas_kernels.attention.mosaic.stores import store_row_scalars, store_rows
from pallas_kernels.mosaic_emit import SCALAR

_LOWEST = -1e30  # finite, so that rows that have seen nothing yet stay free of NaN
_ROUNDING = 1.5 * 2.0**23  # float32 numbers near it are whole
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


def hand_over(turn):
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def attend(
    cfg: KernelConfig,
    queries,
    kv_smem,
    full,
    free,
    q_free,
    turn,
    wg,
    halves,
    tile,
    steps,
    record,
    reach,
    slopes,
    narrow: ByteTiles | None,
):
    """Online softmax over the unit's steps. Returns (acc [64, H], top [64], total [64]), float32.

    queries: [64, H] arrays whose products with the keys add up to the scores, in registers; where
    those are short, SMEM [2, number of them, 64, H], and a step's tiles come one after the other.
    kv_smem: [ring, 2, 64, H] SMEM, from slot ``tile`` on K and V take turns. turn: the barrier of
    the ping-pong, or None. halves: which of a slot's two tiles this warpgroup reads. reach: int32
    [64], each row's position. slopes: float32 [64] in the kernel's units, or None. narrow: for
    tiles of 8 bits. ``top`` is in units of log2. Gives the queries' shared memory back (``q_free``)
    when it has been read.
    """
    H = kv_smem.shape[-1]
    factor = cfg.log2_factor
    ring = jnp.int32(cfg.ring)
    size = TILE * len(halves)
    in_registers = queries_in_registers(H)
    tiles = tuple(enumerate(halves))
    together = in_registers and narrow is None
    parts = (tiles,) if together else tuple((tile,) for tile in tiles)
    start, stop = record[KV_START], record[KV_STOP]
    limit = jnp.minimum(reach + 1, stop)
    columns = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=_WGMMA)

    def step(i, carry, masked):
        held, state = carry
        for part in parts:
            state = attend_part(i, held, state, masked, part)
        if H == TILE:
            # Queries take as many registers as weights then, and ptxas 13.0 puts both into the same
            # ones, though the next step needs the queries. Not if the step may change them; these
            # bits are zeros.
            held = tuple(_flip(some, record[KV_STOP] >> 31) for some in held)
        return held, state

    def attend_part(i, held, state, masked, part):
        """Some of the step's tiles: (place in the step, half of the slot) of each."""
        acc, top, total = state
        is_first, is_last = part is parts[0], part is parts[-1]
        k_slot = lax.rem(tile + 2 * i, ring)
        v_slot = lax.rem(tile + 2 * i + 1, ring)
        firsts = tuple(start + i * size + n * TILE for n, _ in part)
        if is_first:
            plgpu.barrier_wait(full.at[k_slot])

        def scores_of(*refs):
            some_queries = held
            if not in_registers:
                # Else their addresses are worked out before the loop, and fill registers.
                own, _ = lax.optimization_barrier((wg, i))
                some_queries = tuple(queries.at[own, n] for n in range(queries.shape[1]))
            for ref, (_, half) in zip(refs, part, strict=True):
                for some in some_queries:
                    plgpu.wgmma(ref, some, kv_smem.at[k_slot, half].transpose((1, 0)))
            if turn is not None:
                hand_over(turn)
            return tuple(ref[...] for ref in refs)

        accumulator = plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32)
        scores = pl.run_scoped(scores_of, *(accumulator for _ in part))
        if is_last:
            plgpu.barrier_arrive(free.at[k_slot])
        # Not earlier: reads of shared memory may still be under way when an arrival that follows
        # them is seen, and the copy of the next unit's queries overtakes them. The product has
        # used the values, so here they have been read.
        if in_registers and is_first:
            pl.when(i == 0)(lambda: plgpu.barrier_arrive(q_free))
        if narrow is not None:
            scores = tuple(narrow.scaled(s, at) for s, at in zip(scores, firsts, strict=True))
        if cfg.soft_cap is not None:
            scores = tuple(_tanh(s * (cfg.scale / cfg.soft_cap)) for s in scores)
        if slopes is not None:
            scores = tuple(
                add_distance(s, slopes, columns, first, reach)
                for s, first in zip(scores, firsts, strict=True)
            )

        def mask(*scores):
            return tuple(
                _mask(s, columns, first, limit, reach, cfg.sliding_window)
                for s, first in zip(scores, firsts, strict=True)
            )

        scores = lax.cond(masked, mask, lambda *scores: scores, *scores)
        # Whole numbers, so that fading is by powers of two and rounds nothing: a row's result does
        # not depend on how many tiles are weighed at once.
        peaks = []
        for s in scores:
            peaks.append(jnp.maximum(peaks[-1] if peaks else top, _whole(s.max(axis=1) * factor)))
        peak = peaks[-1]
        fade = jnp.exp2(top - peak)
        weights = tuple(
            jnp.exp2(s * factor - lax.broadcast_in_dim(own, s.shape, [0]))
            for s, own in zip(scores, peaks, strict=True)
        )

        def faded(acc, *weights):
            """By the rows' highest peak, each counted from its own until now."""
            counted = [
                w if own is peak else w * lax.broadcast_in_dim(jnp.exp2(own - peak), w.shape, [0])
                for w, own in zip(weights, peaks, strict=True)
            ]
            return acc * lax.broadcast_in_dim(fade, (ROWS, H), [0]), *counted

        # After the first steps a peak seldom grows by a whole power of two.
        changed = _any_differ(top, peak)
        acc, *weights = lax.cond(changed, faded, lambda *same: same, acc, *weights)
        total = total * fade
        dtype16 = kv_smem.dtype if narrow is None else narrow.scratch.dtype
        weights16 = tuple(w.astype(dtype16) for w in weights)
        for w in weights:
            total = total + w.sum(axis=1)
        if turn is not None:
            acc, total, peak, weights16 = lax.optimization_barrier((acc, total, peak, weights16))
            plgpu.barrier_arrive(turn)
        if is_first:
            plgpu.barrier_wait(full.at[v_slot])
        if turn is not None:
            plgpu.barrier_wait(turn)
        if narrow is None:
            values = tuple(kv_smem.at[v_slot, half] for _, half in part)
            for value, first in zip(values, firsts, strict=True):
                _clear_tail(value, stop - first)
        else:
            [(_, half)], [first], values = part, firsts, (narrow.scratch,)
            narrow.widen(kv_smem.at[v_slot, half], first, stop - first, masked)
            if is_last:
                plgpu.barrier_arrive(free.at[v_slot])

        def weigh(ref):
            for w, value in zip(weights16, values, strict=True):
                plgpu.wgmma(ref, w, value)

        acc = pl.run_state(weigh)(plgpu.WGMMAAccumulatorRef.init(acc))
        if is_last and narrow is None:
            plgpu.barrier_arrive(free.at[v_slot])
        return acc, peak, total

    state = (
        plgpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _ROW),
    )
    if turn is not None:  # the second warpgroup stays half a step behind the first
        pl.when(wg == 1)(lambda: hand_over(turn))
    plain = jnp.int32(0)
    if cfg.sliding_window is None:
        plain = lax.div(jnp.maximum(record[ALL_VISIBLE] - start, 0), jnp.int32(size))
    # One loop with a condition in it, not two: in a whole step, code is cold.
    carry = (queries if in_registers else (), state)
    _, state = lax.fori_loop(0, steps, lambda i, c: step(i, c, i >= plain), carry)
    if in_registers:
        pl.when(steps == 0)(lambda: plgpu.barrier_arrive(q_free))
    else:
        plgpu.barrier_arrive(q_free)
    if turn is not None:
        pl.when(wg == 0)(lambda: hand_over(turn))
    return state


def _flip(queries, bits):
    """Queries with these bits, of an int32, flipped in every register."""
    layout = _WGMMA if queries.dtype.itemsize == 2 else plgpu.Layout.WGMMA_8BIT

    @plgpu.inline_mgpu(
        arg_types=(layout, SCALAR),
        return_type=plgpu.ShapeDtypeStruct(queries.shape, queries.dtype, layout=layout),
    )
    def flip(_, queries_, bits_):
        i32, [bits_] = ir.IntegerType.get_signless(32), bits_.registers.flat
        registers = [
            mgpu.utils.bitcast(arith.xori(mgpu.utils.bitcast(register, i32), bits_), register.type)
            for register in queries_.registers.flat
        ]
        flipped = queries_.copy()
        flipped.registers.flat = registers
        return flipped

    return flip(queries, bits)


def _any_differ(a, b):
    """Whether two [64] arrays differ in a row that this warp holds."""

    @plgpu.inline_mgpu(
        arg_types=(_ROW, _ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)
    )
    def vote(_, a_, b_):
        i32, first = ir.IntegerType.get_signless(32), ir.DenseI64ArrayAttr.get([0])

        def number(register):
            return vector.extract(register, [], first)

        unequal = [
            arith.extui(i32, arith.cmpf(arith.CmpFPredicate.UNE, number(x), number(y)))
            for x, y in zip(a_.registers.flat, b_.registers.flat, strict=True)
        ]
        mine = functools.reduce(arith.ori, unequal)
        found = llvm.inline_asm(
            i32,
            [mine],
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.s32 $0, 1, 0, p; }",
            "=r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), SCALAR.to_mgpu(), is_signed=True)

    return vote(a, b) != 0


def _whole(x):
    """The nearest whole number; beyond 2**22, one near it."""
    return (x + _ROUNDING) - _ROUNDING


def _tanh(x):
    """Right to about 1e-6, where the GPU's own is to 2**-11: too little for a cap of 50."""
    root = lax.rsqrt(jnp.exp2(x * (2 * math.log2(math.e))) + 1)
    return 1 - 2 * root * root


def _mask(scores, columns, first, limit, reach, window):
    """-inf where the key at ``first + column`` is not below the row's limit, or left its window."""
    wide = lambda x: lax.broadcast_in_dim(x, scores.shape, [0])  # noqa: E731
    seen = columns < wide(limit - first)
    if window is not None:
        seen = seen & (columns > wide(reach - window - first))
    return jnp.where(seen, scores, -jnp.inf)


def _clear_tail(tile, used):
    """Zero the V rows from ``used`` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(used < TILE)
    def _():
        H = tile.shape[1]
        width = H if queries_in_registers(H) else TILE  # few registers for large head dims
        for start in range(0, H, width):
            some = tile.at[:, pl.ds(start, width)]
            value = plgpu.layout_cast(some[...], _WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA)
            some[...] = jnp.where(rows < used, value, jnp.zeros_like(value))
        plgpu.commit_smem()


def finish(state, targets, entry, row, head, live, G: int, unit=None):
    """Normalise and write the live rows; targets: (out, lse, part, part_lse) in GMEM.

    entry: int32 [64], merge entries or -1. row, head: of matrix row 0. unit: of the values, a
    float32 scalar, None for 1.
    """
    out, lse, part, part_lse = targets
    acc, top, total = state
    empty = total == 0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, total))
    if unit is not None:
        inverse = inverse * unit
    value = (acc * lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(out.dtype)
    log_sum = jnp.log(jnp.where(empty, 1.0, total)) + top * math.log(2.0)
    log_sum = jnp.where(empty, -jnp.inf, log_sum)
    store_rows(out, part, value, entry, row, head, live, G)
    store_row_scalars(lse, part_lse, log_sum, entry, row, head, live, G)
