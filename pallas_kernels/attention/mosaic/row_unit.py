"""Attention of one row: its heads are columns, tokens and head dims are the tensor cores' rows.

The tensor cores take at least 64 rows and 8 columns at once. The heads of one row that share a KV
head are few: as rows they would be padded to 64, and the softmax with them. As columns they are
padded to 8, keys and values are the operands that lie there in 64 rows already, and the sum of
weighted values takes eight numbers a thread. Every number is computed and summed in the order of
``unit.attend``, so that both come to the same bits.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.alibi import add_distance
from pallas_kernels.attention.mosaic.columns import COLUMNS, store_row, total_of
from pallas_kernels.attention.mosaic.config import TILE, KernelConfig
from pallas_kernels.attention.mosaic.fp8 import ByteTiles
from pallas_kernels.attention.mosaic.pack import ALL_VISIBLE, KV_START, KV_STOP
from pallas_kernels.attention.mosaic.ring import Ring
from pallas_kernels.attention.mosaic.row_place import RowPlace
from pallas_kernels.attention.mosaic.softmax import LOWEST, capped, normalised, whole
from pallas_kernels.attention.mosaic.unit import clear_tail

_WGMMA = plgpu.Layout.WGMMA


def attend_row(
    cfg: KernelConfig,
    queries: RowPlace,
    ring: Ring,
    first_slot,
    wg,
    steps,
    record,
    reach,
    slopes,
    narrow: ByteTiles | None,
):
    """(acc [H, C], top [C], total [64, C]), float32, of one row's C heads over the unit's steps.

    As ``softmax.begin`` has them, but for the order: a column of ``total`` holds eight sums again
    and again. queries: staged. first_slot: of the ring, where the unit's first keys are; this
    warpgroup's are half ``wg`` of each. reach: int32, the row's position. slopes: float32 [C] in
    the kernel's units, or None. narrow: for tiles of 8 bits.
    """
    H, C = queries.H, queries.C
    start, stop = record[KV_START], record[KV_STOP]
    limit = record[ALL_VISIBLE]  # by one row: all that it sees
    tokens = plgpu.broadcasted_iota(jnp.int32, (TILE, C), 0, layout=_WGMMA)
    plain = jnp.int32(0)  # steps that the row sees all of
    if cfg.sliding_window is None:
        plain = lax.div(jnp.maximum(record[ALL_VISIBLE] - start, 0), jnp.int32(TILE))

    def products(slot):
        def multiply(ref):
            for some in queries.queries:
                plgpu.wgmma(ref, ring.halves.at[slot, wg], some.transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, C), jnp.float32))

    def seen_only(scores, first):
        seen = tokens < limit - first
        if cfg.sliding_window is not None:
            seen = seen & (tokens > reach - cfg.sliding_window - first)
        return jnp.where(seen, scores, -jnp.inf)

    def step(i, carry):
        acc, top, total = carry
        first = start + i * TILE
        keys, values = ring.of_step(first_slot, i)
        masked = i >= plain
        ring.wait(keys)
        scores = products(keys)
        ring.give_back(keys)
        if narrow is not None:
            scores = narrow.scaled(scores, first, tokens=0)
        if cfg.soft_cap is not None:
            scores = capped(scores, cfg.scale, cfg.soft_cap)
        if slopes is not None:
            scores = add_distance(scores, slopes, tokens, first, reach, axis=1)
        scores = lax.cond(masked, lambda s: seen_only(s, first), lambda s: s, scores)
        factor = cfg.log2_factor
        peak = jnp.maximum(top, whole(queries.highest(scores) * factor))
        weights = jnp.exp2(scores * factor - _tall(peak, scores.shape))
        rounded = weights.astype(jnp.float16 if narrow is not None else ring.halves.dtype)
        queries.put_weights(weights, rounded)
        ring.wait(values)
        used = stop - first
        if narrow is None:
            tile = ring.halves.at[values, wg]
            clear_tail(tile, used)
            plgpu.commit_smem()
        else:
            tile = narrow.widen(ring.halves.at[values, wg], first, used, masked)
            ring.give_back(values)
        faded = jnp.exp2(top - peak)
        total = total * _tall(faded, total.shape) + queries.sums()

        def add(ref):
            plgpu.wgmma(ref, tile.transpose((1, 0)), queries.weights_tile.transpose((1, 0)))

        acc = acc * _tall(faded, acc.shape)
        acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
        if narrow is None:
            ring.give_back(values)
        return acc, peak, total

    nothing = (
        plgpu.layout_cast(jnp.zeros((H, C), jnp.float32), _WGMMA),
        plgpu.layout_cast(jnp.full((C,), LOWEST, jnp.float32), COLUMNS),
        plgpu.layout_cast(jnp.zeros((TILE, C), jnp.float32), _WGMMA),
    )
    return lax.fori_loop(0, steps, step, nothing)


def finish_row(state, targets, entry, row, head, alive, G: int, unit=None):
    """Normalise and write a row's G heads, if ``alive``: see ``softmax.finish``."""
    acc, top, sums = state
    value, log_sum = normalised(acc, top, total_of(sums), unit, 1)
    value = value.astype(targets[0].dtype)
    store_row(targets, value, log_sum, entry, row, head, alive, G)


def _tall(column: Any, shape):
    """A number a column, for every row."""
    return lax.broadcast_in_dim(column, shape, [1])
