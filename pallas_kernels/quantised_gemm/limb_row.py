"""The input row of a GEMV with integer weights as integers: three limbs of seven bits and a scale.

int4 weights become int8 by a mask and a shift for eight of them, where bfloat16 takes four times as
many instructions, and int8 weights need none. So the row has to be integers too: the largest value
of a CTA's slice is scaled below 64 by a power of two, a limb is the nearest integer, and the next
limb is the remainder, times 128. Three limbs keep 20 bits below the largest value: a bfloat16
within 2 ** 12 of it is exact, a smaller one has an error of at most 2 ** -20 of it. wgmma's right
operand has at least eight columns, so limbs cost nothing. It adds their products exactly, as int32.
Zero points, times the sum of the limbs, are subtracted from the products.

Steps multiply gate and up so (`mosaic.limbs_of`).
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from rjax.pallas_kernels.gemv_row import (
    SWIZZLE_ATOM_ROWS,
    ConvertedRow,
    SmemRow,
    StagedRow,
    reduce_warpgroup,
    strided,
)
from rjax.pallas_kernels.mosaic_emit import (
    SCALAR,
    THREADS,
    add,
    div,
    i32,
    i32_type,
    mul,
    rem,
    thread_index,
)
from rjax.pallas_kernels.quantised_gemm.scaled_weight import ScaledWeight
from rjax.pallas_kernels.quantised_gemm.scales import PROMOTION

LIMBS = 3
LIMB_BITS = 7
SIXTEENFOLD = 16
"""int4 weights are multiplied as the upper half of a byte."""

_UNIT = 16  # columns that a thread converts at once
_HALF = _UNIT // 2
_ATOM_COLUMNS = 128  # int8 of a row in a swizzle atom
_EXPONENT = 0x7F800000  # bits of a float32
_SMALLEST = 2.0**-100  # of the largest values: its reciprocal is normal
_BELOW_64 = 259 << 23  # minus the exponent bits of a number below 2 ** (e + 1): 2 ** (5 - e)
_INVERSE = 254 << 23  # minus the bits of a power of two: its reciprocal
_ORDERS = (0x5140, 0x7362)  # of bytes: two of each of two words in turn
_ROUND = 1.5 * 2.0**23  # a float32 plus it has the nearest integer in its low bits


def refusal(weight: ScaledWeight) -> str | None:
    """Why the weight cannot be multiplied with limbs, or None."""
    if weight.is_fp8:
        return "fp8 weights; limbs multiply integers"
    if weight.bits == 4 and not weight.interleaved:
        return "int4 weights in natural order; limbs multiply interleaved ones"
    if weight.block[1] % PROMOTION:
        return f"scales of {weight.block[1]} inputs; limbs take multiples of {PROMOTION}"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class LimbRow(ConvertedRow):
    """A row as `LIMBS` rows of int8 with one scale; the rest of its swizzle atoms is stale.

    row = (limb 0 + limb 1 / 128 + limb 2 / 128 ** 2) * scale. ``SmemRow.scale`` holds the factor of
    the products of each row of the atom, 0 for the stale ones.

    Attributes:
        bits: bits of a weight. The limbs of each 32 columns are in the order in which the halves of
            the bytes of interleaved int4 weights are multiplied (``upcast.load_sixteenfold``).
        zero_points: whether the weight has any.
    """

    bits: int
    zero_points: bool = False

    @property
    def smem_dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int8)

    @property
    def is_staged(self) -> bool:
        return True

    @property
    def has_sums(self) -> bool:
        return self.zero_points

    def fill(self, refs, results, smem_row: SmemRow, scratch, is_first) -> None:
        place = (smem_row.start, smem_row.columns, smem_row.max_columns, smem_row.depth)
        staged = StagedRow(smem_row.staged, (), *place)
        self.source.fill(refs, results, staged, scratch, is_first)
        plgpu.commit_smem()  # every thread sees the whole slice
        largest = reduce_warpgroup("max", _largest(staged), strided(1), scratch)
        split(staged, largest, smem_row, interleaved=self.bits == 4)


def unit_of(bits: int) -> int:
    """The integer that a weight of 1 is multiplied as; bits: bits of a weight."""
    return SIXTEENFOLD if bits == 4 else 1


def _largest(staged: StagedRow):
    """The largest absolute value that each thread reads of the slice: float32 [128]."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, layout=strided(1)),
    )
    def emit(_, staged_, columns_):
        last = add(div(columns_.registers.flat[0], _UNIT), -1)
        found = None
        for unit in _units(staged.max_columns):
            # A thread without a unit of its own reads the last one.
            first = mul(arith.minui(unit, last), _UNIT)
            for at in (first, add(first, _HALF)):
                value = _read(staged_, at)
                value = arith.maximumf(value, arith.negf(value))
                found = value if found is None else arith.maximumf(found, value)
        numbers = [vector.extract(found, [], [i]) for i in range(_HALF)]
        largest = numbers[0]
        for number in numbers[1:]:
            largest = arith.maximumf(largest, number)
        one = ir.VectorType.get((1,), ir.F32Type.get())
        layout = strided(1).to_mgpu()
        registers = mgpu.FragmentedArray.splat(largest, (THREADS,), layout, is_signed=None)
        flat = registers.registers.copy()
        flat.flat[0] = vector.broadcast(one, largest)
        return mgpu.FragmentedArray(_registers=flat, _layout=layout, _is_signed=None)

    return emit(staged.ref, staged.columns)


def split(staged: StagedRow, largest, smem_row: SmemRow, *, interleaved: bool) -> None:
    """Store the limbs of the slice, the factors of their products, and their sums if needed.

    Args:
        staged: the slice.
        largest: float32, the largest of its absolute values.
        smem_row: the result; columns beyond the slice are not written.
        interleaved: whether the columns are in the order of interleaved int4 weights.
    """
    sums = [] if smem_row.sums is None else [smem_row.sums]
    arguments = (plgpu.RefType(), plgpu.RefType(smem_row.transforms), plgpu.RefType())

    @plgpu.inline_mgpu(arg_types=(*arguments, SCALAR, SCALAR, *[plgpu.RefType()] * len(sums)))
    def emit(_, staged_, row_, scale_, columns_, largest_, *sums_):
        units = div(columns_.registers.flat[0], _UNIT)
        factor = _store_scale(scale_, largest_.registers.flat[0], unit_of(4 if interleaved else 8))
        for number in _units(staged.max_columns):
            exists = arith.cmpi(arith.CmpIPredicate.ult, number, units)
            # Without a unit of its own, a thread computes the last one: all take part in the sums.
            unit = arith.minui(number, add(units, -1))
            first = mul(unit, _UNIT)
            halves = (first, add(first, _HALF))
            if interleaved:
                # Of 32 columns, a unit has the first and third eight, or the second and fourth.
                start = arith.addi(mul(div(unit, 2), 2 * _UNIT), mul(rem(unit, 2), _HALF))
                halves = (start, add(start, _UNIT))
            values = [arith.mulf(_read(staged_, at), _splat(factor)) for at in halves]
            limbs = _limbs(values, interleaved)
            with mgpu.when(exists):
                for limb, words in enumerate(limbs):
                    _store_limb(row_, first, limb, words)
            for ref in sums_:
                _store_sums(ref, unit, [_sum_of_group(words) for words in limbs], exists)

    emit(staged.ref, smem_row.ref, smem_row.scale, smem_row.columns, largest, *sums)


def _units(max_columns: int) -> list[Any]:
    """The numbers of this thread's units, int32; some may be beyond the slice."""
    rounds = -(-max_columns // (_UNIT * THREADS))
    return [add(thread_index(), i * THREADS) for i in range(rounds)]


def _read(ref, column):
    """Eight columns from ``column`` (int32) on as float32."""
    index, f32 = ir.IndexType.get(), ir.F32Type.get()
    stored = ir.VectorType.get((_HALF,), ir.MemRefType(ref.type).element_type)
    value = vector.load(stored, ref, [arith.index_cast(index, column)])
    return arith.extf(ir.VectorType.get((_HALF,), f32), value)


def _splat(number):
    return vector.broadcast(ir.VectorType.get((_HALF,), number.type), number)


def _float(number: float):
    return mgpu.c(number, ir.F32Type.get())


def _store_scale(scale, largest, unit: int):
    """Store the factors of the products; return what the row is multiplied with."""
    f32, index = ir.F32Type.get(), ir.IndexType.get()
    bits = arith.bitcast(i32_type(), arith.maximumf(largest, _float(_SMALLEST)))
    exponent = arith.andi(bits, i32(_EXPONENT))
    factor = arith.subi(i32(_BELOW_64), exponent)
    inverse = arith.bitcast(f32, arith.subi(i32(_INVERSE), factor))
    # Not a number if the row has one that is not finite.
    inverse = arith.addf(inverse, arith.subf(largest, largest))
    first = arith.cmpi(arith.CmpIPredicate.eq, thread_index(), i32(0))
    with mgpu.when(first):
        for row in range(SWIZZLE_ATOM_ROWS):
            part = 2.0 ** (-LIMB_BITS * row) / unit if row < LIMBS else 0.0
            at = [mgpu.c(0, index), mgpu.c(row, index)]
            memref.store(arith.mulf(inverse, _float(part)), scale, at)
    return arith.bitcast(f32, factor)


def _limbs(values, interleaved: bool) -> list[list[Any]]:
    """The 16 bytes of each limb, as four words; values: twice float32 [8], absolutely below 64."""
    i8 = ir.IntegerType.get_signless(8)
    integers, pair = (ir.VectorType.get((count,), i32_type()) for count in (_HALF, 2))
    magic = _splat(_float(_ROUND))
    limbs = []
    for _ in range(LIMBS):
        words, rests = [], []
        for value in values:
            rounded = arith.addf(value, magic)
            low = arith.trunci(ir.VectorType.get((_HALF,), i8), arith.bitcast(integers, rounded))
            both = vector.bitcast(pair, low)
            words.append([vector.extract(both, [], [word]) for word in range(2)])
            rest = arith.subf(value, arith.subf(rounded, magic))
            rests.append(arith.mulf(rest, _splat(_float(2.0**LIMB_BITS))))
        values = rests
        if interleaved:
            both = zip(*words, strict=True)
            limbs.append([_permuted(*each, order) for each in both for order in _ORDERS])
        else:
            limbs.append([word for half in words for word in half])
    return limbs


def _store_limb(row, first, limb: int, words) -> None:
    """Store 16 bytes of a limb to columns ``first`` (int32) on."""
    index, i8 = ir.IndexType.get(), ir.IntegerType.get_signless(8)
    value = vector.from_elements(ir.VectorType.get((len(words),), i32_type()), words)
    value = vector.bitcast(ir.VectorType.get((_UNIT,), i8), value)
    atom = arith.index_cast(index, div(first, _ATOM_COLUMNS))
    # The swizzle of this row of an atom.
    chunk = arith.xori(div(rem(first, _ATOM_COLUMNS), _UNIT), i32(limb))
    column = arith.index_cast(index, mul(chunk, _UNIT))
    at = [mgpu.c(0, index), atom, mgpu.c(limb, index), column]
    vector.store(value, row, at, alignment=_UNIT)


def _sum_of_group(words):
    """The sum of the bytes of the eight threads that have a group of 128 columns, int32."""
    total = i32(0)
    for word in words:
        arguments = [word, i32(0x01010101), total]
        form = "dp4a.s32.s32 $0, $1, $2, $3;"
        total = llvm.inline_asm(i32_type(), arguments, form, "=r,r,r,r")
    for distance in (1, 2, 4):
        total = arith.addi(total, mgpu.utils.shfl_bfly(total, distance))
    return total


def _store_sums(ref, unit, sums, exists) -> None:
    """Store the sums of a group of units; each of its eight threads stores one column."""
    index, equal = ir.IndexType.get(), arith.CmpIPredicate.eq
    column = rem(thread_index(), SWIZZLE_ATOM_ROWS)
    found = i32(0)
    for limb, each in enumerate(sums):
        found = arith.select(arith.cmpi(equal, column, i32(limb)), each, found)
    group = div(unit, _ATOM_COLUMNS // _UNIT)
    with mgpu.when(exists):
        at = [arith.index_cast(index, each) for each in (group, column)]
        memref.store(arith.sitofp(ir.F32Type.get(), found), ref, at)


def _permuted(low, high, order: int):
    """Four of the eight bytes of two words."""
    return llvm.inline_asm(
        i32_type(), [low, high, i32(order)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
    )
