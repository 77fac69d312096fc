"""The steps of one unit of many rows: which tiles the tensor cores get, and when."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.attention.mosaic.config import ROWS, TILE, KernelConfig, queries_in_registers
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.pack import ALL_VISIBLE, KV_START, KV_STOP
from pallas_kernels.attention.mosaic.softmax import Softmax, begin, fade
from pallas_kernels.mosaic_emit import SCALAR

_WGMMA = plgpu.Layout.WGMMA
_SCORES = plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32)


def attend(
    cfg: KernelConfig,
    queries,
    kv_smem,
    full,
    free,
    q_free,
    turn,
    wg,
    halves: tuple[Any, ...],
    slot,
    steps,
    record,
    reach,
    slopes,
    narrow: ByteTiles | None,
):
    """Attention of 64 rows over the unit's steps; returns the state as ``softmax.begin`` has it.

    The tiles of a step are weighed together where there is room for their scores, else one after
    the other. With ``turn``, one warpgroup's softmax runs beside the other's products.

    queries: [64, H] arrays whose products with the keys add up to the scores, in registers; where
    those are short, SMEM [2, number of them, 64, H]. kv_smem: [ring, 2, 64, H] SMEM, the unit's
    first keys in ring slot ``slot``. turn: the barrier where warpgroups hand over the tensor cores,
    or None. halves: of a ring slot, that this warpgroup reads in a step, one tile behind the other.
    reach: int32 [64], each row's position. slopes:
    float32 [64] in the kernel's units, or None. narrow: for tiles of 8 bits. Gives the queries'
    shared memory back (``q_free``) when it has been read.
    """
    H = kv_smem.shape[-1]
    ring = jnp.int32(cfg.ring)
    size = TILE * len(halves)
    in_registers = queries_in_registers(H)
    start, stop = record[KV_START], record[KV_STOP]
    softmax = Softmax(
        cfg,
        plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=_WGMMA),
        jnp.minimum(reach + 1, stop),
        reach,
        slopes,
        narrow,
        kv_smem.dtype if narrow is None else narrow.scratch.dtype,
    )
    plain = jnp.int32(0)  # steps that every row sees all of
    if cfg.sliding_window is None:
        plain = lax.div(jnp.maximum(record[ALL_VISIBLE] - start, 0), jnp.int32(size))

    def places_of(i):
        """Ring slots of step i's keys and values."""
        return (lax.rem(slot + 2 * i + offset, ring) for offset in range(2))

    def first_of(i, n: int):
        return start + i * size + n * TILE

    def multiply_keys(ref, held, place, n: int, i):
        """Give the tensor cores the products with tile n's keys, in ring slot ``place``."""
        some_queries = held
        if not in_registers:
            # Else their addresses are worked out before the loop, and fill registers.
            own, _ = lax.optimization_barrier((wg, i))
            some_queries = tuple(queries.at[own, n] for n in range(queries.shape[1]))
        for some in some_queries:
            plgpu.wgmma(ref, some, kv_smem.at[place, halves[n]].transpose((1, 0)))

    def weigh(i, part, scores, top):
        firsts = tuple(first_of(i, n) for n in part)
        return softmax.weigh(scores, firsts, top, i >= plain)

    def values_of(i, place, n: int):
        """Tile n's values in 16 bits, zero behind the item's last token."""
        ref = kv_smem.at[place, halves[n]]
        used = stop - first_of(i, n)
        if narrow is None:
            clear_tail(ref, used)
            return ref
        return narrow.widen(ref, first_of(i, n), used, i >= plain)

    def flipped(held):
        if H != TILE:
            return held
        # Queries take as many registers as weights then, and ptxas 13.0 puts both into the same
        # ones, though the next step needs the queries. Not if the step may change them; these bits
        # are zeros.
        return tuple(_flip(some, stop >> 31) for some in held)

    together = narrow is None and in_registers
    every = tuple(range(len(halves)))
    parts = (every,) if together else tuple((n,) for n in every)

    def step(i, carry):
        """Part after part: scores, weights, values."""
        held, acc, top, total = carry
        keys, values = places_of(i)
        for part in parts:

            def multiply(*refs, part=part):
                if part is parts[0]:
                    plgpu.barrier_wait(full.at[keys])
                for ref, n in zip(refs, part, strict=True):
                    multiply_keys(ref, held, keys, n, i)
                if turn is not None:
                    _hand_over(turn)
                return tuple(ref[...] for ref in refs)

            scores = pl.run_scoped(multiply, *(_SCORES for _ in part))
            if part is parts[-1]:
                plgpu.barrier_arrive(free.at[keys])
            if in_registers and part is parts[0]:
                pl.when(i == 0)(lambda: plgpu.barrier_arrive(q_free))
            weights, sums, peaks = weigh(i, part, scores, top)
            acc, total, weights = fade(acc, total, top, weights, sums, peaks)
            top = peaks[-1]
            if turn is not None:
                acc, weights = lax.optimization_barrier((acc, weights))
                plgpu.barrier_arrive(turn)
            if part is parts[0]:
                plgpu.barrier_wait(full.at[values])
            if turn is not None:
                plgpu.barrier_wait(turn)
            tiles = tuple(values_of(i, values, n) for n in part)
            if narrow is not None and part is parts[-1]:
                plgpu.barrier_arrive(free.at[values])

            def add(ref, weights=weights, tiles=tiles):
                for w, tile in zip(weights, tiles, strict=True):
                    plgpu.wgmma(ref, w, tile)

            acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
            if narrow is None and part is parts[-1]:
                plgpu.barrier_arrive(free.at[values])
        return flipped(held), acc, top, total

    held, state = queries if in_registers else (), begin(H)
    # Queries' memory is not given back before a product has used the values: reads of it may still
    # be under way when an arrival that follows them is seen, and the copy of the next unit's
    # queries overtakes them.
    if turn is not None:  # the second warpgroup stays half a step behind the first
        pl.when(wg == 1)(lambda: _hand_over(turn))
    # One loop with a condition in it, not two: in a whole step, code is cold.
    _, *state = lax.fori_loop(0, steps, step, (held, *state))
    if in_registers:
        pl.when(steps == 0)(lambda: plgpu.barrier_arrive(q_free))
    else:
        plgpu.barrier_arrive(q_free)
    if turn is not None:
        pl.when(wg == 0)(lambda: _hand_over(turn))
    return tuple(state)


def _hand_over(turn):
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


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


def clear_tail(tile, used):
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
