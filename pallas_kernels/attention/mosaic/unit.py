"""The steps of one unit of many rows: which tiles the tensor cores get, and when."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.config import ROWS, TILE, KernelConfig
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.pack import ALL_VISIBLE, KV_START, KV_STOP
from pallas_kernels.attention.mosaic.ring import Ring
from pallas_kernels.attention.mosaic.softmax import Softmax, begin, fade

_WGMMA = plgpu.Layout.WGMMA


def attend(
    cfg: KernelConfig,
    queries,
    place,
    q_free,
    ring: Ring,
    first_slot,
    halves: tuple[Any, ...],
    wg,
    turn,
    steps,
    record,
    reach,
    slopes,
    narrow: ByteTiles | None,
):
    """Attention of 64 rows over the unit's steps; returns the state as ``softmax.begin`` has it.

    The tiles of a step are weighed together where there is room for their scores, else one after
    the other. With ``turn``, one warpgroup's softmax runs beside the other's products.

    queries: SMEM [places, n, rows, H], of which the first 64 rows of n arrays at ``place`` are this
    warpgroup's; the products of all n with the keys add up to the scores. q_free: the barrier that
    gives the place back. first_slot: of the ring, where the unit's first keys are. halves: of a
    slot, that this warpgroup reads in a step, one tile behind the other. turn: the barrier where
    warpgroups hand over the tensor cores, or None. reach: int32 [64], each row's position. slopes:
    float32 [64] in the kernel's units, or None. narrow: for tiles of 8 bits.
    """
    H = ring.halves.shape[-1]
    size = TILE * len(halves)
    start, stop = record[KV_START], record[KV_STOP]
    softmax = Softmax(
        cfg,
        plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=_WGMMA),
        jnp.minimum(reach + 1, stop),
        reach,
        slopes,
        narrow,
        ring.halves.dtype if narrow is None else narrow.scratch.dtype,
    )
    plain = jnp.int32(0)  # steps that every row sees all of
    if cfg.sliding_window is None:
        plain = lax.div(jnp.maximum(record[ALL_VISIBLE] - start, 0), jnp.int32(size))

    def first_of(i, n: int):
        return start + i * size + n * TILE

    def multiply_keys(ref, slot, part, i):
        """Give the tensor cores the products with the keys of a part, in the ring's ``slot``."""
        # Else the addresses of queries are worked out before the loop, and fill registers.
        own, _ = lax.optimization_barrier((place, i))
        both = len(part) == 2
        keys = ring.whole.at[slot] if both else ring.halves.at[slot, halves[part[0]]]
        for n in range(queries.shape[1]):
            rows = queries.at[own, n, pl.ds(0, ROWS)]
            plgpu.wgmma(ref, rows, keys.transpose((1, 0)))

    def weigh(i, part, scores, top):
        firsts = tuple(first_of(i, n) for n in part)
        return softmax.weigh(scores, firsts, top, i >= plain)

    def values_of(i, slot, n: int):
        """Tile n's values in 16 bits, zero behind the item's last token."""
        ref = ring.halves.at[slot, halves[n]]
        used = stop - first_of(i, n)
        if narrow is None:
            clear_tail(ref, used)
            return ref
        return narrow.widen(ref, first_of(i, n), used, i >= plain)

    together = narrow is None and H <= 2 * TILE  # there is room for the scores of two tiles
    every = tuple(range(len(halves)))
    parts = (every,) if together else tuple((n,) for n in every)

    def step(i, carry):
        """Part after part: scores, weights, values."""
        acc, top, total = carry
        keys, values = ring.of_step(first_slot, i)
        for part in parts:

            def multiply(ref, part=part):
                if part is parts[0]:
                    ring.wait(keys)
                multiply_keys(ref, keys, part, i)
                if turn is not None:
                    _hand_over(turn)
                return ref[...]

            shape = (ROWS, len(part) * TILE)
            products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            scores = _tiles(products)
            if part is parts[-1]:
                ring.give_back(keys)
            weights, sums, peaks = weigh(i, part, scores, top)
            acc, total, weights = fade(acc, total, top, weights, sums, peaks)
            top = peaks[-1]
            if turn is not None:
                acc, weights = lax.optimization_barrier((acc, weights))
                plgpu.barrier_arrive(turn)
            if part is parts[0]:
                ring.wait(values)
            if turn is not None:
                plgpu.barrier_wait(turn)
            tiles = tuple(values_of(i, values, n) for n in part)
            if narrow is not None and part is parts[-1]:
                ring.give_back(values)

            def add(ref, weights=weights, tiles=tiles):
                for w, tile in zip(weights, tiles, strict=True):
                    plgpu.wgmma(ref, w, tile)

            acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
            if narrow is None and part is parts[-1]:
                ring.give_back(values)
        return acc, top, total

    if turn is not None:  # the second warpgroup stays half a step behind the first
        pl.when(wg == 1)(lambda: _hand_over(turn))
    # One loop with a condition in it, not two: in a whole step, code is cold.
    state = lax.fori_loop(0, steps, step, begin(H))
    plgpu.barrier_arrive(q_free)
    if turn is not None:
        pl.when(wg == 0)(lambda: _hand_over(turn))
    return state


def _hand_over(turn):
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _tiles(products):
    """[64, 64] arrays out of one or two side by side."""
    if products.shape[1] == TILE:
        return (products,)
    kind = plgpu.ShapeDtypeStruct((ROWS, TILE), jnp.float32, layout=_WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=(kind, kind))
    def split(_, products_):
        return products_[:, :TILE], products_[:, TILE:]

    return split(products)


def clear_tail(tile, used):
    """Zero the V rows from ``used`` on: what lies there may be NaN, and 0 * NaN is NaN."""

    @pl.when(used < TILE)
    def _():
        H = tile.shape[1]
        width = H if H <= 2 * TILE else TILE  # few registers for large head dims
        for start in range(0, H, width):
            some = tile.at[:, pl.ds(start, width)]
            value = plgpu.layout_cast(some[...], _WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA)
            some[...] = jnp.where(rows < used, value, jnp.zeros_like(value))
        plgpu.commit_smem()
