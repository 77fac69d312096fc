"""Pages in float8_e4m3fn, for the tensor cores: exact queries in two parts, values in float16.

Keys go to the tensor cores as they are. A bfloat16 query has eight significant bits, which two
float8_e4m3fn numbers of four hold between them, once its row is scaled to what float8 reaches; a
float16 query is rounded to as many. Values must be transposed on the way, which the tensor cores do
for 16-bit numbers only: a tile is converted into shared memory of its warpgroup.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels.attention.mosaic.config import TILE

_BYTES = plgpu.Layout.WGMMA_8BIT
_SCALAR = plgpu.Layout.WG_SPLAT(())
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


@dataclasses.dataclass(frozen=True, slots=True)
class PageScales:
    """Scales that differ from page to page, for one unit: of a sequence and a KV head.

    scales: float32 [P, K] and table: int32 [B, M], in GMEM; row (of the table), head and last (the
    last page that the unit reads): int32 scalars; S: tokens a page.
    """

    scales: Any
    table: Any
    row: Any
    head: Any
    last: Any
    S: int

    def of_tile(self, first):
        """The scale of the tile whose tokens from ``first`` on lie in one page."""
        page = jnp.minimum(lax.div(first, jnp.int32(self.S)), self.last)
        return self.scales[self.table[self.row, page], self.head]

    def of_tokens(self, first, layout):
        """The scales of the tile's 64 tokens, float32 [64], in a layout of one dimension."""
        scalars = (first, self.row, self.head, self.last)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), *(_SCALAR for _ in scalars)),
            return_type=plgpu.ShapeDtypeStruct((TILE,), jnp.float32, layout=layout),
        )
        def gather(_, table_, scales_, *scalars_):
            index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
            start, row, head, last = (x.registers.flat[0] for x in scalars_)

            def element(token):
                token = arith.addi(start, arith.index_cast(i32, token))
                place = arith.minsi(arith.divui(token, mgpu.c(self.S, i32)), last)
                at = [arith.index_cast(index, x) for x in (row, place)]
                page = memref.load(table_, at)
                return memref.load(scales_, [arith.index_cast(index, x) for x in (page, head)])

            return mgpu.FragmentedArray.build((TILE,), layout.to_mgpu(), element)

        return gather(self.table, self.scales, *scalars)

    def applied(self, value, first, axis: int, layout):
        """float32 value [64, A] or [A, 64], its tokens along ``axis``, times their scales."""
        if self.S % TILE == 0:
            return value * self.of_tile(first)
        scales = self.of_tokens(first, plgpu.Layout.WGMMA.reduce(1 - axis))
        scales = lax.broadcast_in_dim(scales, value.shape, [axis])
        return value * plgpu.layout_cast(scales, layout)


@dataclasses.dataclass(frozen=True, slots=True)
class ByteTiles:
    """What one warpgroup needs to attend to float8_e4m3fn tiles.

    units: of the queries' products with the keys, float32 [64]; of one row's heads, [C]. scratch:
    float16 [64, H] SMEM, the warpgroup's own, for a tile of values. keys, values: their scales
    where they differ from page to page, or None.
    """

    units: Any
    scratch: Any
    keys: PageScales | None
    values: PageScales | None

    def scaled(self, products, first, tokens: int):
        """The scores of the tile at token ``first``, before the softmax scale.

        tokens: the axis of the products that they are along.
        """
        scores = products * lax.broadcast_in_dim(self.units, products.shape, [1 - tokens])
        if self.keys is not None:
            scores = self.keys.applied(scores, first, tokens, plgpu.Layout.WGMMA)
        return scores

    def widen(self, tile, first, used, masked):
        """The values at token ``first`` in 16 bits: the scratch, [64, H] SMEM.

        Zero from row ``used`` on if ``masked``. tile: float8_e4m3fn [64, H] SMEM; masked: bool
        scalar. On return the warpgroup has read it, and the tensor cores may read the result.
        Exact, but for the rounding of scales of pages to float16.
        """
        result = self.scratch
        _meet()  # the product before has read the scratch, in all warps
        H = tile.shape[1]

        def cleared(value):  # what lies there may be NaN, and 0 * NaN is NaN
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_BYTES)
            return jnp.where(rows < used, value, jnp.zeros_like(value))

        width = plgpu.find_swizzle(H * 8)  # columns at once: few registers for large head dims
        for start in range(0, H, width):
            columns = (slice(None), pl.ds(start, width))
            value = plgpu.load(tile.at[columns], layout=_BYTES).astype(jnp.float16)
            if self.values is not None:
                wide = self.values.applied(value.astype(jnp.float32), first, 0, _BYTES)
                value = wide.astype(jnp.float16)
            value = lax.cond(masked, cleared, lambda value: value, value)
            result.at[columns][...] = value
        plgpu.commit_smem()
        return result


def _meet() -> None:
    """All warps of the warpgroup have come here."""

    @plgpu.inline_mgpu(arg_types=())
    def meet(_):
        mgpu.utils.warpgroup_barrier()

    meet()
