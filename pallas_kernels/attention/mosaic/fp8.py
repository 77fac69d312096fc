"""Pages in float8_e4m3fn, for the tensor cores: exact queries in two parts, values in float16.

Keys go to the tensor cores as they are. A bfloat16 query has eight significant bits, which two
float8_e4m3fn numbers of four hold between them, once its row is scaled to what float8 reaches; a
float16 query is rounded to as many. Values must be transposed on the way, which the tensor cores do
for 16-bit numbers only: a tile is converted, exactly, into shared memory of its warpgroup.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# pyright: reportAbstractUsage=false
_BYTES = plgpu.Layout.WGMMA_8BIT
_LEAST = 2.0**-100  # so that rows of zeros do not divide by zero


def split_queries(ref):
    """(high, low), unit: queries [64, H] as two float8_e4m3fn arrays, and float32 [64].

    Row m is (high[m] + low[m]) * unit[m] to eight significant bits, for numbers from 1/1000 of the
    row's largest on, and to that place for smaller ones. ref: 16-bit, in SMEM.
    """
    value = plgpu.load(ref, layout=_BYTES, optimized=False).astype(jnp.float32)
    largest = jnp.maximum(jnp.abs(value).max(axis=1), _LEAST)
    # Powers of two: scaling by them rounds nothing. The largest comes to between 128 and 256.
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    unit = lax.bitcast_convert_type(exponent, jnp.float32) * (1 / 128)
    inverse = lax.broadcast_in_dim(1 / unit, value.shape, [0])
    value = value * plgpu.layout_cast(inverse, _BYTES)
    high = value.astype(jnp.float8_e4m3fn)
    low = (value - high.astype(jnp.float32)).astype(jnp.float8_e4m3fn)
    return (high, low), unit


def widen(tile, scratch, used, masked: bool):
    """``scratch`` = ``tile`` in float16, zero from row ``used`` on if ``masked``.

    tile: float8_e4m3fn [64, H] SMEM; scratch: float16, this warpgroup's own. On return the
    warpgroup has read the tile, and the tensor cores may read the scratch.
    """
    value = plgpu.load(tile, layout=_BYTES).astype(jnp.float16)
    if masked:  # what lies there may be NaN, and 0 * NaN is NaN
        rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_BYTES)
        value = jnp.where(rows < used, value, jnp.zeros_like(value))
    plgpu.commit_smem()  # the product before has read the scratch, in all warps
    scratch[...] = value
    plgpu.commit_smem()
