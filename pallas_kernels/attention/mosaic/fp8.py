"""KV pages in float8_e4m3fn: queries in two fp8 parts, V tiles converted to float16.

K tiles go to wgmma as they are. Queries become two float8_e4m3fn arrays, a high and a low part of
four significant bits each, after each row is scaled into the range of fp8: this is exact for
bfloat16, which has eight bits, and rounds float16 to eight. V must be transposed on the way to
wgmma, which supports that for 16-bit types only: a warpgroup converts its V tile from the KV
pipeline into a float16 buffer in shared memory, 64 * H * 2 bytes. Scales come from GMEM, float32,
one per KV head, or one per KV head and page.
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
from jaxlib.mlir.dialects import arith, llvm, memref

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE
from rjax.pallas_kernels.attention.mosaic.cta import ConsumerTile
from rjax.pallas_kernels.attention.mosaic.fragments import extract, pair_type
from rjax.pallas_kernels.mosaic.emit import SCALAR, i32, i32_type

_WGMMA_8BIT = plgpu.Layout.WGMMA_8BIT
_MIN_ABS_MAX = 2.0**-100  # so that rows of zeros do not divide by zero
_MIN_EXPONENT = 27 << 23  # the bits of ``_MIN_ABS_MAX``
_EXPONENT_MASK = 0x7F800000


def split_queries(ref, others=()):
    """((high, low), scale): queries [64, W] as two float8_e4m3fn arrays, and float32 [64].

    Row m is (high[m] + low[m]) * scale[m], to eight significant bits for elements of at least
    1/1000 of the row's largest, and with that absolute error for smaller ones. ref: 16-bit [64, W]
    SMEM. others: the other parts of a split head's queries; all parts have the same scale.
    """
    value = _load_queries(ref)
    largest = jnp.maximum(jnp.abs(value).max(axis=1), _MIN_ABS_MAX)
    for other in others:
        largest = jnp.maximum(largest, jnp.abs(_load_queries(other)).max(axis=1))
    # Scaling by a power of two is exact. The largest element is then between 128 and 256.
    exponent = lax.bitcast_convert_type(largest, jnp.int32) & _EXPONENT_MASK
    scale = lax.bitcast_convert_type(exponent, jnp.float32) * (1 / 128)
    inverse = lax.broadcast_in_dim(1 / scale, value.shape, [0])
    value = value * plgpu.layout_cast(inverse, _WGMMA_8BIT)
    high = value.astype(jnp.float8_e4m3fn)
    low = (value - high.astype(jnp.float32)).astype(jnp.float8_e4m3fn)
    return (high, low), scale


def _load_queries(ref):
    return plgpu.load(ref, layout=_WGMMA_8BIT, optimized=False).astype(jnp.float32)


def scale_of_words(runs: list[list], element):
    """(numbers, scale, 1 / scale): a row's 16-bit words as float32 pairs, and its fp8 scale.

    The scale is that of ``split_queries``. runs: the words that this thread holds of the row, which
    sixteen threads share; element: their MLIR type.
    """
    numbers = [[_to_f32(word, element) for word in words] for words in runs]
    flat = [x for words in numbers for pair in words for x in pair]
    largest = _absolute(flat[0])
    for x in flat[1:]:
        largest = arith.maximumf(largest, _absolute(x))
    for distance in (1, 2, 4, 8):
        largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
    exponent = arith.andi(mgpu.utils.bitcast(largest, i32_type()), i32(_EXPONENT_MASK))
    exponent = arith.maxsi(exponent, i32(_MIN_EXPONENT))
    # Powers of two: scaling by them rounds nothing. The largest comes to between 128 and 256.
    f32 = ir.F32Type.get()
    scale = mgpu.utils.bitcast(arith.subi(exponent, i32(7 << 23)), f32)
    inverse = mgpu.utils.bitcast(arith.subi(i32(261 << 23), exponent), f32)
    return numbers, scale, inverse


def split_numbers(numbers: list[list], inverse):
    """(high, low): two float32 pairs times ``inverse`` in two fp8 parts, two int16 each."""
    scaled = [arith.mulf(x, inverse) for pair in numbers for x in pair]
    high = [_to_fp8(scaled[n], scaled[n + 1]) for n in (0, 2)]
    back = [x for pair in high for x in _from_fp8(pair)]
    rest = [arith.subf(a, b) for a, b in zip(scaled, back, strict=True)]
    return high, [_to_fp8(rest[n], rest[n + 1]) for n in (0, 2)]


def _absolute(x):
    bits = arith.andi(mgpu.utils.bitcast(x, i32_type()), i32(0x7FFFFFFF))
    return mgpu.utils.bitcast(bits, ir.F32Type.get())


def _to_f32(word, element):
    """The two 16-bit numbers in a word."""
    pair = mgpu.utils.bitcast(word, pair_type(element))
    return [arith.extf(ir.F32Type.get(), extract(pair, n)) for n in range(2)]


def _to_fp8(first, second):
    """Two float32 numbers as float8_e4m3fn, int16."""
    return llvm.inline_asm(
        ir.IntegerType.get_signless(16),
        [second, first],
        "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;",
        "=h,f,f",
    )


def _from_fp8(pair):
    """The two float8_e4m3fn numbers in an int16, as float32."""
    word = llvm.inline_asm(i32_type(), [pair], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
    return _to_f32(word, ir.F16Type.get())


@dataclasses.dataclass(frozen=True, slots=True)
class PageScales:
    """Scales that differ from page to page, for one sequence and one KV head.

    Attributes:
        scales: float32 [P, K] GMEM.
        page_table: int32 [B, M] GMEM.
        table_row, head: int32 scalars.
        last_page: int32, number of the last page that the work tile reads.
        page_size: S, static.
    """

    scales: Any
    page_table: Any
    table_row: Any
    head: Any
    last_page: Any
    page_size: int

    def of_tile(self, first):
        """The scale of a tile that lies in one page, from token ``first`` on."""
        page = jnp.minimum(lax.div(first, jnp.int32(self.page_size)), self.last_page)
        return self.scales[self.page_table[self.table_row, page], self.head]

    def of_tokens(self, first, layout):
        """The scales of the tile's 64 tokens, float32 [64], in a layout of one dimension."""
        scalars = (first, self.table_row, self.head, self.last_page)

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType(), (SCALAR,) * len(scalars)),
            return_type=plgpu.ShapeDtypeStruct((KV_TILE,), jnp.float32, layout=layout),
        )
        def gather(_, table_, scales_, scalars_):
            index = ir.IndexType.get()
            start, row, head, last = (x.registers.flat[0] for x in scalars_)

            def element(token):
                token = arith.addi(start, arith.index_cast(i32_type(), token))
                number = arith.minsi(arith.divui(token, i32(self.page_size)), last)
                at = [arith.index_cast(index, x) for x in (row, number)]
                page = memref.load(table_, at)
                return memref.load(scales_, [arith.index_cast(index, x) for x in (page, head)])

            return mgpu.FragmentedArray.build((KV_TILE,), layout.to_mgpu(), element)

        return gather(self.page_table, self.scales, scalars)

    def apply(self, value, first, token_axis: int, layout):
        """float32 value [64, A] or [A, 64], tokens along ``token_axis``, times their scales."""
        if self.page_size % KV_TILE == 0:
            return value * self.of_tile(first)
        scales = self.of_tokens(first, plgpu.Layout.WGMMA.reduce(1 - token_axis))
        scales = lax.broadcast_in_dim(scales, value.shape, [token_axis])
        return value * plgpu.layout_cast(scales, layout)


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Tiles:
    """Scales and scratch memory with which one warpgroup reads float8_e4m3fn tiles.

    Attributes:
        product_scale: float32 [64], or [C] in swap-AB decode: scale of the products with the keys.
        v_f16: float16 [64, W] SMEM, the warpgroup's own, for a converted V tile.
        k_scales, v_scales: scales that differ from page to page, or None.
    """

    product_scale: Any
    v_f16: Any
    k_scales: PageScales | None
    v_scales: PageScales | None

    @classmethod
    def of(cls, consumer: ConsumerTile, q_scale) -> "Fp8Tiles":
        """The scales and scratch of a work tile whose split queries have the scale ``q_scale``."""
        cta, tile, kv_head = consumer.cta, consumer.tile, consumer.kv_head
        k_scales, v_scales, S = cta.gmem.k_scales, cta.gmem.v_scales, cta.shape.S
        last_page = lax.div(tile.kv_stop - 1, jnp.int32(S))
        pages = (cta.gmem.page_table, tile.table_row, kv_head, last_page, S)
        return cls(
            q_scale * k_scales[kv_head] if len(k_scales.shape) == 1 else q_scale,
            cta.smem.v_f16.at[cta.wg],
            PageScales(k_scales, *pages) if len(k_scales.shape) == 2 else None,
            PageScales(v_scales, *pages) if len(v_scales.shape) == 2 else None,
        )

    def scale_products(self, products, first, token_axis: int):
        """The unscaled scores from fp8 products with the keys of the tile at token ``first``."""
        scale = lax.broadcast_in_dim(self.product_scale, products.shape, [1 - token_axis])
        scores = products * scale
        if self.k_scales is not None:
            scores = self.k_scales.apply(scores, first, token_axis, plgpu.Layout.WGMMA)
        return scores

    def convert_values(self, tile, first, used, masked):
        """The V tile at token ``first`` in float16: ``v_f16``.

        Rows from ``used`` (int32) on are zero if ``masked`` (bool scalar). tile: float8_e4m3fn
        [64, W] SMEM. On return the warpgroup has read it, and wgmma may read the result. Exact,
        except that scales of pages round to float16.
        """
        result = self.v_f16
        _warpgroup_barrier()  # all warps have finished the wgmma that read v_f16
        H = tile.shape[1]

        def clear_unused(value):  # stale rows may be NaN, and 0 * NaN is NaN
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA_8BIT)
            return jnp.where(rows < used, value, jnp.zeros_like(value))

        width = plgpu.find_swizzle(H * 8)  # columns at once: few registers for large head dims
        for start in range(0, H, width):
            columns = (slice(None), pl.ds(start, width))
            value = plgpu.load(tile.at[columns], layout=_WGMMA_8BIT).astype(jnp.float16)
            if self.v_scales is not None:
                scaled = self.v_scales.apply(value.astype(jnp.float32), first, 0, _WGMMA_8BIT)
                value = scaled.astype(jnp.float16)
            value = lax.cond(masked, clear_unused, lambda value: value, value)
            result.at[columns][...] = value
        plgpu.commit_smem()
        return result


def _warpgroup_barrier() -> None:
    @plgpu.inline_mgpu(arg_types=())
    def barrier(_):
        mgpu.utils.warpgroup_barrier()

    barrier()
