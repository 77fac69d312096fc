"""The shared memory of one row's attention, where its heads are columns (``columns``).

All of it lies in the place where a unit's queries have come, which holds 64 rows and of which the
queries of one row fill little:

    queries as they came [C, H], later sums of weights | queries as the tensor cores read them |
    weights [C, 64] | highest scores [4, C] | units of queries [C]
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

from pallas_kernels.attention.mosaic import quads
from pallas_kernels.attention.mosaic.columns import (
    COLUMNS,
    columns,
    element_of,
    inserted,
    pair_type,
    places_of_run,
    store_number,
    two_rows,
)
from pallas_kernels.attention.mosaic.config import ROWS, TILE
from pallas_kernels.mosaic_emit import (
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
_ATOM = 8  # rows that are swizzled together
_LEAST_EXPONENT = 27 << 23  # of 2**-100, so that rows of zeros do not divide by zero
_EXPONENT = 0x7F800000


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlace:
    """A place for queries, as a unit of one row uses it.

    plain: 16-bit [64, H] SMEM, as queries come. tiles: [n, C, H] and weights: 16-bit [n, C, 64],
    other views of the same bytes, as the tensor cores read them. itemsize: bytes of a number of
    ``tiles``: with 1, queries are two parts, of which each is a tile.
    """

    plain: Any
    tiles: Any
    weights: Any
    C: int
    H: int
    itemsize: int

    def __post_init__(self) -> None:
        assert self._units + 4 * self.C <= ROWS * self.H * 2

    @staticmethod
    def views(rows: int, C: int, H: int, itemsize: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of ``tiles`` and ``weights`` that fill a place of so many rows."""
        size = rows * H * 2
        return (size // (C * H * itemsize), C, H), (size // (C * TILE * 2), C, TILE)

    @property
    def queries(self) -> tuple[Any, ...]:
        """[C, H] SMEM: arrays whose products with the keys add up to the scores."""
        first = 2 // self.itemsize
        return tuple(self.tiles.at[first + part] for part in range(first))

    @property
    def weights_tile(self):
        """[C, 64] SMEM."""
        return self.weights.at[2 * self._size // (self.C * TILE * 2)]

    @property
    def _size(self) -> int:
        """Bytes of the queries as they come, and of them as the tensor cores read them."""
        return self.C * self.H * 2

    @property
    def _weights(self) -> int:
        return 2 * self._size

    @property
    def _highest(self) -> int:
        return self._weights + self.C * TILE * 2

    @property
    def _units(self) -> int:
        return self._highest + _WARPS * self.C * 4

    def stage(self):
        """Bring the queries into the form that the tensor cores read.

        Sixteen threads a row. For 8-bit tiles in two parts, as by ``fp8.split_queries``, whose
        units ``units`` has then. A call of ``commit_smem`` must follow.
        """
        split = self.itemsize == 1

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def bring(_, ref):
            for row0 in range(0, self.C, _ATOM):
                row = add(div(thread_index(), 16), row0)
                starts = [
                    add(mul(rem(thread_index(), 16), 4), first) for first in range(0, self.H, TILE)
                ]
                numbers = [add(mul(row, self.H), start) for start in starts]
                runs = [quads.read(address(ref, mul(n, 2)), 2, SHARED) for n in numbers]
                if split:
                    element = ir.MemRefType(ref.type).element_type
                    self._split(ref, row, starts, runs, element)
                    continue
                for start, words in zip(starts, runs, strict=True):
                    place = _swizzled(row, start, self.H, 2)
                    quads.write(address(ref, add(place, self._size)), words, SHARED)

        bring(self.plain)

    def _split(self, ref, row, starts, runs, element):
        """Both parts of four numbers of a row from each start on, and the row's unit."""
        f32, i16 = ir.F32Type.get(), ir.IntegerType.get_signless(16)
        numbers = [[_to_f32(word, element) for word in words] for words in runs]
        flat = [x for words in numbers for pair in words for x in pair]
        largest = _absolute(flat[0])
        for x in flat[1:]:
            largest = arith.maximumf(largest, _absolute(x))
        for distance in (1, 2, 4, 8):
            largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
        exponent = arith.andi(mgpu.utils.bitcast(largest, i32_type()), i32(_EXPONENT))
        exponent = arith.maxsi(exponent, i32(_LEAST_EXPONENT))
        # Powers of two: scaling by them rounds nothing. The largest comes to between 128 and 256.
        unit = mgpu.utils.bitcast(arith.subi(exponent, i32(7 << 23)), f32)
        inverse = mgpu.utils.bitcast(arith.subi(i32(261 << 23), exponent), f32)
        for start, words in zip(starts, numbers, strict=True):
            scaled = [arith.mulf(x, inverse) for pair in words for x in pair]
            high = [_to_fp8(scaled[n], scaled[n + 1]) for n in (0, 2)]
            back = [x for pair in high for x in _from_fp8(pair)]
            rest = [arith.subf(a, b) for a, b in zip(scaled, back, strict=True)]
            low = [_to_fp8(rest[n], rest[n + 1]) for n in (0, 2)]
            place = add(_swizzled(row, start, self.H, 1), self._size)
            for part, halves in enumerate((high, low)):
                assert all(half.type == i16 for half in halves)
                word = arith.ori(
                    arith.extui(i32_type(), halves[0]),
                    arith.shli(arith.extui(i32_type(), halves[1]), i32(16)),
                )
                quads.write(address(ref, add(place, part * self.C * self.H)), [word], SHARED)
        bits = mgpu.utils.bitcast(unit, i32_type())
        with mgpu.when(_equal(rem(thread_index(), 16), 0)):
            quads.write(address(ref, add(mul(row, 4), self._units)), [bits], SHARED)

    def units(self):
        """What ``stage`` left there, float32 [C]."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def load(_, ref):
            return columns(self.C, lambda run: _load_pair(ref, self._units, 0, run, self.C))

        return load(self.plain)

    def highest(self, scores):
        """float32 [C]: the highest of each column of [64, C]. All warps meet on the way."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _WGMMA),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def find(_, ref, scores_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            mine = []
            for run in range(self.C // 8):
                upper, lower = two_rows(scores_, run)
                best = arith.maximumf(upper, lower)
                for distance in (4, 8, 16):
                    best = arith.maximumf(best, mgpu.utils.shfl_bfly(best, distance))
                mine.append(best)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, i32(4))):
                for run, best in enumerate(mine):
                    _store_pair(ref, self._highest, warp, run, self.C, best)
            mgpu.utils.warpgroup_barrier()

            def of_all(run):
                found = [_load_pair(ref, self._highest, w, run, self.C) for w in range(_WARPS)]
                return arith.maximumf(
                    arith.maximumf(found[0], found[1]), arith.maximumf(found[2], found[3])
                )

            return columns(self.C, of_all)

        return find(self.plain, scores)

    def put_weights(self, weights, rounded):
        """Weights [64, C], float32 and ``rounded`` to 16 bits, to where others find them.

        ``commit_smem`` must follow; then ``weights_tile`` and ``sums`` may be read.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _WGMMA))
        def put(_, ref, weights_, rounded_):
            lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
            token = add(mul(warp, 16), div(lane, 4))
            for run in range(self.C // 8):
                upper, lower = two_rows(weights_, run)
                place = add(mul(warp, 8), div(lane, 4))
                _store_pair(ref, 0, place, run, self.C, arith.addf(upper, lower))
                for which, pair in enumerate(two_rows(rounded_, run)):
                    for n in range(2):
                        column = add(mul(rem(lane, 4), 2), n)
                        at = _swizzled(column, add(token, 8 * which), TILE, 2)
                        at = add(at, self._weights + run * _ATOM * TILE * 2)
                        store_number(pointer(address(ref, at), SHARED), element_of(pair, n))

        put(self.plain, weights, rounded)

    def sums(self):
        """float32 [64, C]: sums of the weights over rows 8 apart, which those rows all hold.

        In the order of ``softmax``, so that both come to the same bits.
        """

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((ROWS, self.C), jnp.float32, layout=_WGMMA),
        )
        def gather(_, ref):
            lane = rem(thread_index(), 32)
            result = _zeros((ROWS, self.C))
            for run in range(self.C // 8):
                found = [
                    _load_pair(ref, 0, add(div(lane, 4), 8 * w), run, self.C) for w in range(_WARPS)
                ]
                total = arith.addf(arith.addf(found[0], found[1]), arith.addf(found[2], found[3]))
                for at in places_of_run(result, run):
                    result.registers[at] = total
            return result

        return gather(self.plain)


def _swizzled(row, column, width: int, itemsize: int):
    """Byte of a number in a tile of whole atoms, as TMA and the tensor cores see it.

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
    words = [mgpu.utils.bitcast(element_of(pair, n), i32_type()) for n in range(2)]
    quads.write(address(ref, _pair_place(base, row, run, C)), words, SHARED)


def _load_pair(ref, base: int, row, run: int, C: int):
    words = quads.read(address(ref, _pair_place(base, row, run, C)), 2, SHARED)
    pair = llvm.mlir_undef(pair_type(ir.F32Type.get()))
    for n, word in enumerate(words):
        pair = inserted(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
    return pair


def _pair_place(base: int, row, run: int, C: int):
    """Byte of this thread's two columns in a row of float32 [..., C] at byte ``base``."""
    row = row if isinstance(row, ir.Value) else i32(row)
    column = add(mul(rem(thread_index(), 4), 2), 8 * run)
    return add(mul(arith.addi(mul(row, C), column), 4), base)


def _absolute(x):
    bits = arith.andi(mgpu.utils.bitcast(x, i32_type()), i32(0x7FFFFFFF))
    return mgpu.utils.bitcast(bits, ir.F32Type.get())


def _to_f32(word, element):
    """The two 16-bit numbers in a word."""
    pair = mgpu.utils.bitcast(word, pair_type(element))
    return [arith.extf(ir.F32Type.get(), element_of(pair, n)) for n in range(2)]


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
