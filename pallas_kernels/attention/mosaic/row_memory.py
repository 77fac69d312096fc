"""Where one row's heads are columns: how their tiles meet shared and global memory.

The tensor cores' layout of such a tile, [64 * n, C] with a head a column, gives each thread rows
i / 4 and i / 4 + 8 of its warp's 16 (thread i of the warp) and columns 2 * (i % 4) and the next, of
every 8. All shared memory here lies in the place where a unit's queries have come, which holds 64
rows and of which the queries of one row fill little:

    queries as they came [C, H], later sums of weights | queries as the tensor cores read them |
    weights [C, 64] | highest scores [4, C] | units of queries [C]
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic import quads
from pallas_kernels.attention.mosaic.config import ROWS, TILE
from pallas_kernels.mosaic_emit import SCALAR, thread_index

_WGMMA = plgpu.Layout.WGMMA
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a number a column."""
_WARPS = 4
_ATOM = 8  # rows that are swizzled together
_LEAST_EXPONENT = 27 << 23  # of 2**-100, so that rows of zeros do not divide by zero
_EXPONENT = 0x7F800000
_SHARED, _GLOBAL = 3, 1


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

        Sixteen threads a row. For 8-bit tiles, returns the units of ``fp8.split_queries``, float32
        [C]; else None. A call of ``commit_smem`` must follow.
        """
        split = self.itemsize == 1

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def bring(_, ref):
            for row0 in range(0, self.C, _ATOM):
                row = _add(_div(thread_index(), 16), row0)
                columns = [
                    _add(_mul(_rem(thread_index(), 16), 4), start)
                    for start in range(0, self.H, TILE)
                ]
                runs = [
                    quads.read(_at(ref, _mul(arith.addi(_mul(row, self.H), column), 2)), 2, _SHARED)
                    for column in columns
                ]
                if split:
                    element = ir.MemRefType(ref.type).element_type
                    self._split(ref, row, columns, runs, element)
                    continue
                for column, words in zip(columns, runs, strict=True):
                    place = _swizzled(row, column, self.H, 2)
                    quads.write(_at(ref, _add(place, self._size)), words, _SHARED)

        bring(self.plain)

    def _split(self, ref, row, columns, runs, element):
        f32, i16 = ir.F32Type.get(), ir.IntegerType.get_signless(16)
        numbers = [[_to_f32(word, element) for word in words] for words in runs]
        flat = [x for words in numbers for pair in words for x in pair]
        largest = _absolute(flat[0])
        for x in flat[1:]:
            largest = arith.maximumf(largest, _absolute(x))
        for distance in (1, 2, 4, 8):
            largest = arith.maximumf(largest, mgpu.utils.shfl_bfly(largest, distance))
        exponent = arith.andi(mgpu.utils.bitcast(largest, _i32_type()), _i32(_EXPONENT))
        exponent = arith.maxsi(exponent, _i32(_LEAST_EXPONENT))
        # Powers of two: scaling by them rounds nothing. The largest comes to between 128 and 256.
        unit = mgpu.utils.bitcast(arith.subi(exponent, _i32(7 << 23)), f32)
        inverse = mgpu.utils.bitcast(arith.subi(_i32(261 << 23), exponent), f32)
        for column, words in zip(columns, numbers, strict=True):
            scaled = [arith.mulf(x, inverse) for pair in words for x in pair]
            high = [_to_fp8(scaled[n], scaled[n + 1]) for n in (0, 2)]
            back = [x for pair in high for x in _from_fp8(pair)]
            rest = [arith.subf(a, b) for a, b in zip(scaled, back, strict=True)]
            low = [_to_fp8(rest[n], rest[n + 1]) for n in (0, 2)]
            place = _add(_swizzled(row, column, self.H, 1), self._size)
            for part, halves in enumerate((high, low)):
                assert all(half.type == i16 for half in halves)
                word = arith.ori(
                    arith.extui(_i32_type(), halves[0]),
                    arith.shli(arith.extui(_i32_type(), halves[1]), _i32(16)),
                )
                quads.write(_at(ref, _add(place, part * self.C * self.H)), [word], _SHARED)
        bits = mgpu.utils.bitcast(unit, _i32_type())
        with mgpu.when(_equal(_rem(thread_index(), 16), 0)):
            quads.write(_at(ref, _add(_mul(row, 4), self._units)), [bits], _SHARED)

    def units(self):
        """What ``stage`` left there, float32 [C]."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def load(_, ref):
            return _columns(self.C, lambda run: _load_pair(ref, self._units, 0, run, self.C))

        return load(self.plain)

    def highest(self, scores):
        """float32 [C]: the highest of each column of [64, C]. All warps meet on the way."""

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _WGMMA),
            return_type=plgpu.ShapeDtypeStruct((self.C,), jnp.float32, layout=COLUMNS),
        )
        def find(_, ref, scores_):
            lane, warp = _rem(thread_index(), 32), _div(thread_index(), 32)
            mine = []
            for run in range(self.C // 8):
                upper, lower = _two_rows(scores_, run)
                best = arith.maximumf(upper, lower)
                for distance in (4, 8, 16):
                    best = arith.maximumf(best, mgpu.utils.shfl_bfly(best, distance))
                mine.append(best)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, _i32(4))):
                for run, best in enumerate(mine):
                    _store_pair(ref, self._highest, warp, run, self.C, best)
            mgpu.utils.warpgroup_barrier()

            def of_all(run):
                found = [_load_pair(ref, self._highest, w, run, self.C) for w in range(_WARPS)]
                return arith.maximumf(
                    arith.maximumf(found[0], found[1]), arith.maximumf(found[2], found[3])
                )

            return _columns(self.C, of_all)

        return find(self.plain, scores)

    def put_weights(self, weights, rounded):
        """Weights [64, C], float32 and ``rounded`` to 16 bits, to where others find them.

        ``commit_smem`` must follow; then ``weights_tile`` and ``sums`` may be read.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _WGMMA, _WGMMA))
        def put(_, ref, weights_, rounded_):
            lane, warp = _rem(thread_index(), 32), _div(thread_index(), 32)
            token = _add(_mul(warp, 16), _div(lane, 4))
            for run in range(self.C // 8):
                upper, lower = _two_rows(weights_, run)
                place = _add(_mul(warp, 8), _div(lane, 4))
                _store_pair(ref, 0, place, run, self.C, arith.addf(upper, lower))
                for which, pair in enumerate(_two_rows(rounded_, run)):
                    for n in range(2):
                        column = _add(_mul(_rem(lane, 4), 2), n)
                        at = _swizzled(column, _add(token, 8 * which), TILE, 2)
                        at = _add(at, self._weights + run * _ATOM * TILE * 2)
                        _store(_pointer(_at(ref, at), _SHARED), _element(pair, n))

        put(self.plain, weights, rounded)

    def sums(self):
        """float32 [64, C]: sums of the weights over rows 8 apart, which those rows all hold.

        In the order of ``softmax``, so that both come to the same bits.
        """

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(),),
            return_type=plgpu.ShapeDtypeStruct((ROWS, self.C), jnp.float32, layout=_WGMMA),
        )
        def add(_, ref):
            lane = _rem(thread_index(), 32)
            result = _zeros((ROWS, self.C))
            for run in range(self.C // 8):
                found = [
                    _load_pair(ref, 0, _add(_div(lane, 4), 8 * w), run, self.C)
                    for w in range(_WARPS)
                ]
                total = arith.addf(arith.addf(found[0], found[1]), arith.addf(found[2], found[3]))
                for at in _places(result, run):
                    result.registers[at] = total
            return result

        return add(self.plain)


def total_of(sums):
    """float32 [C]: the sum over eight rows one behind the other of [64, C], whose every eight rows
    are the same."""
    C = sums.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def add(_, sums_):
        def of(run):
            total, _ = _two_rows(sums_, run)
            for distance in (4, 8, 16):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            return total

        return _columns(C, of)

    return add(sums)


def gather_columns(table, head0, C: int):
    """``table[min(head0 + c, N - 1)]`` for C columns; table: float32 [N] in GMEM."""
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def gather(_, ref, head_):
        [start] = head_.registers.flat
        lane = _rem(thread_index(), 4)

        def of(run):
            pair = llvm.mlir_undef(_pair_type(ir.F32Type.get()))
            for n in range(2):
                column = _add(_mul(lane, 2), 8 * run + n)
                head = arith.minsi(arith.addi(start, column), _i32(last))
                [word] = quads.read(_at(ref, _mul(head, 4)), 1, _GLOBAL)
                pair = _inserted(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
            return pair

        return _columns(C, of)

    return gather(table, head0)


def store_row(targets, value, log_sum, entry, row, head, alive, G: int):
    """Write a row's G heads, from ``head`` on, if ``alive`` (int32) is not 0.

    targets: out [T, N, H], lse [T, N], part [X, N, H], part_lse [X, N] in GMEM. value: 16-bit
    [H, C]; log_sum: float32 [C]; entry: int32, the merge entry, or -1 to write row ``row``.
    """
    C = value.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType() for _ in targets),
            _WGMMA,
            COLUMNS,
            *(SCALAR for _ in range(4)),
        ),
    )
    def store(_, out, lse, part, part_lse, value_, log_sum_, entry_, row_, head_, alive_):
        [entry], [row] = entry_.registers.flat, row_.registers.flat
        [head], [alive] = head_.registers.flat, alive_.registers.flat
        N, H = ir.MemRefType(out.type).shape[1:]
        direct = arith.cmpi(arith.CmpIPredicate.slt, entry, _i32(0))
        i64 = ir.IntegerType.get_signless(64)
        first = arith.addi(
            arith.muli(arith.extsi(i64, arith.select(direct, row, entry)), mgpu.c(N, i64)),
            arith.extsi(i64, head),
        )
        rows = arith.select(direct, _at(out, _i32(0)), _at(part, _i32(0)))
        rows = arith.addi(rows, arith.muli(first, mgpu.c(2 * H, i64)))
        scalars = arith.select(direct, _at(lse, _i32(0)), _at(part_lse, _i32(0)))
        scalars = arith.addi(scalars, arith.muli(first, mgpu.c(4, i64)))
        lane, warp = _rem(thread_index(), 32), _div(thread_index(), 32)
        alive = arith.cmpi(arith.CmpIPredicate.ne, alive, _i32(0))
        for run in range(C // 8):
            for n in range(2):
                column = _add(_mul(_rem(lane, 4), 2), 8 * run + n)
                known = arith.cmpi(arith.CmpIPredicate.ult, column, _i32(G))
                with mgpu.when(arith.andi(alive, known)):
                    for at in _places(value_, run):
                        number = _add(_mul(warp, 16), 64 * at[0] + 8 * at[4])
                        number = arith.addi(_mul(column, H), arith.addi(number, _div(lane, 4)))
                        place = arith.addi(rows, arith.extui(i64, _mul(number, 2)))
                        _store(_pointer(place, _GLOBAL), _element(value_.registers[at], n))
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread_index(), _i32(4))):
                        place = arith.addi(scalars, arith.extui(i64, _mul(column, 4)))
                        pair = log_sum_.registers.flat[run]
                        _store(_pointer(place, _GLOBAL), _element(pair, n))

    store(*targets, value, log_sum, entry, row, head, alive)


def _swizzled(row, column, width: int, itemsize: int):
    """Byte of a number in a tile of whole atoms, as TMA and the tensor cores see it.

    row, column: int32; width: numbers a row.
    """
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    atom, per_row = _ATOM * swizzle, width * itemsize // swizzle
    column = _mul(column, itemsize)
    place = arith.addi(_mul(_div(row, _ATOM), per_row), _div(column, swizzle))
    place = arith.addi(_mul(place, atom), _mul(_rem(row, _ATOM), swizzle))
    place = arith.addi(place, _rem(column, swizzle))
    bits = arith.andi(arith.shrui(place, _i32(7)), _i32(swizzle // 16 - 1))
    return arith.xori(place, arith.shli(bits, _i32(4)))


def _columns(C: int, of):
    """A [C] array in the layout COLUMNS; ``of(run)`` is a pair of each run of eight columns."""
    layout = COLUMNS.to_mgpu()
    registers = np.empty(layout.registers_shape((C,)), dtype=object)
    assert registers.size == C // 8
    registers.flat = [of(run) for run in range(C // 8)]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def _zeros(shape):
    zero = arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), 0.0))
    return mgpu.FragmentedArray.splat(zero, shape, _WGMMA.to_mgpu())


def _places(array, run: int):
    """Registers of a run of eight columns, of all rows."""
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [at for at in np.ndindex(shape) if at[1] == run]


def _two_rows(array, run: int):
    """A thread's pairs of its first and second rows of [64, C]."""
    first, second = (array.registers[at] for at in _places(array, run))
    return first, second


def _store_pair(ref, base: int, row, run: int, C: int, pair) -> None:
    words = [mgpu.utils.bitcast(_element(pair, n), _i32_type()) for n in range(2)]
    quads.write(_at(ref, _pair_place(base, row, run, C)), words, _SHARED)


def _load_pair(ref, base: int, row, run: int, C: int):
    words = quads.read(_at(ref, _pair_place(base, row, run, C)), 2, _SHARED)
    pair = llvm.mlir_undef(_pair_type(ir.F32Type.get()))
    for n, word in enumerate(words):
        pair = _inserted(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
    return pair


def _pair_place(base: int, row, run: int, C: int):
    """Byte of this thread's two columns in a row of float32 [..., C] at byte ``base``."""
    row = row if isinstance(row, ir.Value) else _i32(row)
    column = _add(_mul(_rem(thread_index(), 4), 2), 8 * run)
    return _add(_mul(arith.addi(_mul(row, C), column), 4), base)


def _at(ref, byte):
    """int64 address of a byte (int32) after the ref's first."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), arith.extui(i64, byte))


def _pointer(place, space: int):
    return llvm.inttoptr(ir.Type.parse(f"!llvm.ptr<{space}>"), place)


def _store(pointer, value) -> None:
    llvm.store(value, pointer, alignment=mgpu.utils.bitwidth(value.type) // 8)


def _element(pair, n: int):
    return vector.extract(pair, [], ir.DenseI64ArrayAttr.get([n]))


def _inserted(value, pair, n: int):
    return vector.insert(value, pair, [], ir.DenseI64ArrayAttr.get([n]))


def _pair_type(element):
    return ir.VectorType.get((2,), element)


def _absolute(x):
    bits = arith.andi(mgpu.utils.bitcast(x, _i32_type()), _i32(0x7FFFFFFF))
    return mgpu.utils.bitcast(bits, ir.F32Type.get())


def _to_f32(word, element):
    """The two 16-bit numbers in a word."""
    pair = mgpu.utils.bitcast(word, _pair_type(element))
    return [arith.extf(ir.F32Type.get(), _element(pair, n)) for n in range(2)]


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
    word = llvm.inline_asm(_i32_type(), [pair], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
    return _to_f32(word, ir.F16Type.get())


def _i32_type():
    return ir.IntegerType.get_signless(32)


def _i32(value):
    return value if isinstance(value, ir.Value) else mgpu.c(value, _i32_type())


def _equal(value, number: int):
    return arith.cmpi(arith.CmpIPredicate.eq, value, _i32(number))


def _add(value, number):
    return arith.addi(value, _i32(number))


def _mul(value, by: int):
    return arith.muli(value, _i32(by))


def _div(value, by: int):
    return arith.divui(value, _i32(by))


def _rem(value, by: int):
    return arith.remui(value, _i32(by))
