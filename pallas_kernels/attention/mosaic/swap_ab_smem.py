"""Swap-AB shared memory: queries, probabilities and reductions of one row's decode.

All of it is in the warpgroup's query buffer, which holds 64 rows; the queries of one row need only
a few of them. In bytes from the start of the buffer, for C columns:

    raw queries [C, H], 16-bit, later partial sums | queries for wgmma [C, H] | probabilities for
    wgmma [C, 64], 16-bit | column maxima, float32 [4 warps, C] | query scales, float32 [C]

Nothing goes to GMEM. A warpgroup's four warps split the 64 tokens of a tile, so that column maxima
and sums go through this memory.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.attention.mosaic import fragment_io
from rjax.pallas_kernels.attention.mosaic.config import KV_TILE, WGMMA_M
from rjax.pallas_kernels.attention.mosaic.swap_ab_fragments import (
    COLUMNS,
    build_columns,
    extract,
    insert,
    pair_type,
    row_pair,
    run_indices,
    store_number,
)
from rjax.pallas_kernels.mosaic_emit import (
    SHARED,
    add,
    address,
    div,
    i32,
    i32_type,
    mul,
    pointer,
    rem,
    thread_index,
)

_WGMMA = plgpu.Layout.WGMMA
_WARPS = 4
_ATOM = 8  # rows of a swizzle atom
_MIN_EXPONENT = 27 << 23  # of 2**-100, so that rows of zeros do not divide by zero
_EXPONENT_MASK = 0x7F800000


@dataclasses.dataclass(frozen=True, slots=True)
class SwapAbSmem:
    """One query buffer, as swap-AB decode uses it.

    Attributes:
        raw: 16-bit [64, H] SMEM in rows, as TMA writes queries; the other two view the same bytes.
        q_tiles: [n, C, H] of the pages' dtype, swizzled for wgmma.
        p_tiles: 16-bit [n, C, 64], swizzled for wgmma.
        C, H: static.
        itemsize: bytes of a number of ``q_tiles``. With 1, queries are two tiles: the high and the
            low part, as in ``fp8.split_queries``.
    """

    raw: Any
    q_tiles: Any
    p_tiles: Any
    C: int
    H: int
    itemsize: int

    def __post_init__(self) -> None:
        assert self._scales_at + 4 * self.C <= WGMMA_M * self.H * 2

    @staticmethod
    def view_shapes(
        rows: int, C: int, H: int, itemsize: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of ``q_tiles`` and ``p_tiles`` that fill a query buffer of ``rows`` rows."""
        size = rows * H * 2
        return (size // (C * H * itemsize), C, H), (size // (C * KV_TILE * 2), C, KV_TILE)

    @property
    def queries(self) -> tuple[Any, ...]:
        """[C, H] SMEM: operands whose products with the keys add up to the scores."""
        first = 2 // self.itemsize
        return tuple(self.q_tiles.at[first + part] for part in range(first))

    @property
    def p_tile(self):
        """[C, 64] SMEM: the operand of the second product."""
        return self.p_tiles.at[self._p_at // (self.C * KV_TILE * 2)]

    @property
    def _q_bytes(self) -> int:
        """Bytes of the raw queries, and of the queries for wgmma."""
        return self.C * self.H * 2

    @property
    def _p_at(self) -> int:
        return 2 * self._q_bytes

    @property
    def _max_at(self) -> int:
        return self._p_at + self.C * KV_TILE * 2

    @property
    def _scales_at(self) -> int:
        return self._max_at + _WARPS * self.C * 4

    def stage_queries(self) -> None:
        """Convert the raw queries into operands of wgmma.

        Sixteen threads convert a row. For 8-bit tiles also write the query scales. The caller must
        call ``commit_smem`` next.
        """
        split = self.itemsize == 1

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def convert(_, ref):
            for row0 in range(0, self.C, _ATOM):
                row = add(div(thread_index(), 16), row0)
                starts = [
                    add(mul(rem(thread_index(), 16), 4), first)
                    for first in range(0, self.H, KV_TILE)
                ]
                numbers = [add(mul(row, self.H), start) for start in starts]
                runs = [fragment_io.read_words(address(ref, mul(n, 2)), 2, SHARED) for n in numbers]
                if split:
                    element = ir.MemRefType(ref.type).element_type
                    self._split(ref, row, starts, runs, element)
                    continue
                for start, words in zip(starts, runs, strict=True):
                    place = _swizzled(row, start, self.H, 2)
                    fragment_io.write_words(address(ref, add(place, self._q_bytes)), words, SHARED)

        convert(self.raw)

    def _split(self, ref, row, starts, runs, element):
        """Write both fp8 parts of four elements from each start on, and the row's scale."""
        f32, i16 = ir.F32Type.get(), ir.IntegerType.get_signless(16)
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
        scale = mgpu.utils.bitcast(arith.subi(exponent, i32(7 << 23)), f32)
        inverse = mgpu.utils.bitcast(arith.subi(i32(261 << 23), exponent), f32)
        for start, words in zip(starts, numbers, strict=True):
            scaled = [arith.mulf(x, inverse) for pair in words for x in pair]
            high = [_to_fp8(scaled[n], scaled[n + 1]) for n in (0, 2)]
            back = [x for pair in high for x in _from_fp8(pair)]
            rest = [arith.subf(a, b) for a, b in zip(scaled, back, strict=True)]
            low = [_to_fp8(rest[n], rest[n + 1]) for n in (0, 2)]
            place = add(_swizzled(row, start, self.H, 1), self._q_bytes)
            for part, halves in enumerate((high, low)):
                assert all(half.type == i16 for half in halves)
                word = arith.ori(
                    arith.extui(i32_type(), halves[0]),
                    arith.shli(arith.extui(i32_type(), halves[1]), i32(16)),
                )
                fragment_io.write_words(
                    address(ref, add(place, part * self.C * self.H)), [word], SHARED
                )
        bits = mgpu.utils.bitcast(scale, i32_type())
        with mgpu.when(_equal(rem(thread_index(), 16), 0)):
            fragment_io.write_words(address(ref, add(mul(row, 4), self._scales_at)), [bits], SHARED)

    def query_scales(self):
        """float32 [C]: the scales of queries in two fp8 parts."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def load(_, ref):
            return build_columns(
                self.C, lambda run: _load_pair(ref, self._scales_at, 0, run, self.C)
            )

        return load(self.raw)

    def column_max(self, scores):
        """float32 [C]: the maximum of each column of [64, C]; a barrier of the warpgroup."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _WGMMA),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def find(_, ref, scores_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            own = []
            for run in range(self.C // 8):
                upper, lower = row_pair(scores_, run)
                best = arith.maximumf(upper, lower)
                for distance in (4, 8, 16):
                    best = arith.maximumf(best, mgpu.utils.shfl_bfly(best, distance))
                own.append(best)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, i32(4))):
                for run, best in enumerate(own):
                    _store_pair(ref, self._max_at, warp, run, self.C, best)
            mgpu.utils.warpgroup_barrier()

            def of_all(run):
                found = [_load_pair(ref, self._max_at, w, run, self.C) for w in range(_WARPS)]
                return arith.maximumf(
                    arith.maximumf(found[0], found[1]), arith.maximumf(found[2], found[3])
                )

            return build_columns(self.C, of_all)

        return find(self.raw, scores)

    def store_probabilities(self, p, rounded) -> None:
        """Write probabilities [64, C], ``rounded`` to 16 bits, and sums of the float32 ones.

        The caller must call ``commit_smem`` next; then ``p_tile`` and ``row_sums`` are valid.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _WGMMA))
        def store(_, ref, p_, rounded_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            token = add(mul(warp, 16), div(lane, 4))
            for run in range(self.C // 8):
                upper, lower = row_pair(p_, run)
                place = add(mul(warp, 8), div(lane, 4))
                _store_pair(ref, 0, place, run, self.C, arith.addf(upper, lower))
                for which, pair in enumerate(row_pair(rounded_, run)):
                    for n in range(2):
                        column = add(mul(rem(lane, 4), 2), n)
                        at = _swizzled(column, add(token, 8 * which), KV_TILE, 2)
                        at = add(at, self._p_at + run * _ATOM * KV_TILE * 2)
                        store_number(pointer(address(ref, at), SHARED), extract(pair, n))

        store(self.raw, p, rounded)

    def row_sums(self):
        """float32 [64, C]: sums of the probabilities over rows 8 apart, which all hold the sum.

        The order of the sums is that of ``softmax``, so that both paths give the same bits.
        """

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((WGMMA_M, self.C), jnp.float32, layout=_WGMMA),
        )
        def gather(_, ref):
            lane = rem(thread_index(), 32)
            result = _zeros((WGMMA_M, self.C))
            for run in range(self.C // 8):
                found = [
                    _load_pair(ref, 0, add(div(lane, 4), 8 * w), run, self.C) for w in range(_WARPS)
                ]
                total = arith.addf(arith.addf(found[0], found[1]), arith.addf(found[2], found[3]))
                for at in run_indices(result, run):
                    result.registers[at] = total
            return result

        return gather(self.raw)


def _swizzled(row, column, width: int, itemsize: int):
    """Byte offset of a number in a tile of whole swizzle atoms, as TMA and wgmma see it.

    row, column: int32; width: numbers a row.
    """
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    atom, per_row = _ATOM * swizzle, width * itemsize // swizzle
    column = mul(column, itemsize)
    place = arith.addi(mul(div(row, _ATOM), per_row), div(column, swizzle))
    place = arith.addi(mul(place, atom), mul(rem(row, _ATOM), swizzle))
    place = arith.addi(place, rem(column, swizzle))
    bits = arith.andi(arith.shrui(place, i32(7)), i32(swizzle // 16 - 1))
    return arith.xori(place, arith.shli(bits, i32(4)))


def _zeros(shape):
    zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
    return mgpu.FragmentedArray.splat(zero, shape, _WGMMA.to_mgpu())


def _store_pair(ref, base: int, row, run: int, C: int, pair) -> None:
    words = [mgpu.utils.bitcast(extract(pair, n), i32_type()) for n in range(2)]
    fragment_io.write_words(address(ref, _pair_offset(base, row, run, C)), words, SHARED)


def _load_pair(ref, base: int, row, run: int, C: int):
    words = fragment_io.read_words(address(ref, _pair_offset(base, row, run, C)), 2, SHARED)
    pair = llvm.mlir_undef(pair_type(ir.F32Type.get()))
    for n, word in enumerate(words):
        pair = insert(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
    return pair


def _pair_offset(base: int, row, run: int, C: int):
    """Byte offset of this thread's two columns in a row of float32 [..., C] at byte ``base``."""
    row = row if isinstance(row, ir.Value) else i32(row)
    column = add(mul(rem(thread_index(), 4), 2), 8 * run)
    return add(mul(arith.addi(mul(row, C), column), 4), base)


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


def _equal(value, number: int):
    return arith.cmpi(arith.CmpIPredicate.eq, value, i32(number))
