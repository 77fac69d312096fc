"""Tiles whose columns are one row's heads, [64 * n, C], and numbers a column, [C].

The tensor cores' layout gives thread i of a warp rows i / 4 and i / 4 + 8 of the warp's 16, and
columns 2 * (i % 4) and the next, of every run of eight.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic import quads
from pallas_kernels.mosaic_emit import (
    GLOBAL,
    SCALAR,
    add,
    address,
    div,
    i32,
    mul,
    pointer,
    rem,
    thread_index,
)

_WGMMA = plgpu.Layout.WGMMA
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a number a column."""


def total_of(sums):
    """float32 [C]: the sum over eight rows one behind the other of [64, C], whose every eight rows
    are the same."""
    C = sums.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def combine(_, sums_):
        def of(run):
            total, _ = two_rows(sums_, run)
            for distance in (4, 8, 16):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            return total

        return columns(C, of)

    return combine(sums)


def gather_columns(table, head0, C: int):
    """``table[min(head0 + c, N - 1)]`` for C columns; table: float32 [N] in GMEM."""
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def gather(_, ref, head_):
        [start] = head_.registers.flat
        lane = rem(thread_index(), 4)

        def of(run):
            pair = llvm.mlir_undef(pair_type(ir.F32Type.get()))
            for n in range(2):
                column = add(mul(lane, 2), 8 * run + n)
                head = arith.minsi(arith.addi(start, column), i32(last))
                [word] = quads.read(address(ref, mul(head, 4)), 1, GLOBAL)
                pair = inserted(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
            return pair

        return columns(C, of)

    return gather(table, head0)


def store_row(targets, value, log_sum, entry, row, head, alive, G: int):
    """Write a row's G heads, from ``head`` on, if ``alive`` (int32) is not 0: number by number, as
    neighbours of a head dim are in eight threads; once a unit.

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
        direct = arith.cmpi(arith.CmpIPredicate.slt, entry, i32(0))
        i64 = ir.IntegerType.get_signless(64)
        first = arith.addi(
            arith.muli(arith.extsi(i64, arith.select(direct, row, entry)), mgpu.c(N, i64)),
            arith.extsi(i64, head),
        )
        rows = arith.select(direct, address(out, i32(0)), address(part, i32(0)))
        rows = arith.addi(rows, arith.muli(first, mgpu.c(2 * H, i64)))
        scalars = arith.select(direct, address(lse, i32(0)), address(part_lse, i32(0)))
        scalars = arith.addi(scalars, arith.muli(first, mgpu.c(4, i64)))
        lane, warp = rem(thread_index(), 32), div(thread_index(), 32)
        alive = arith.cmpi(arith.CmpIPredicate.ne, alive, i32(0))
        for run in range(C // 8):
            for n in range(2):
                column = add(mul(rem(lane, 4), 2), 8 * run + n)
                known = arith.cmpi(arith.CmpIPredicate.ult, column, i32(G))
                with mgpu.when(arith.andi(alive, known)):
                    for at in places_of_run(value_, run):
                        number = add(mul(warp, 16), 64 * at[0] + 8 * at[4])
                        number = arith.addi(mul(column, H), arith.addi(number, div(lane, 4)))
                        place = arith.addi(rows, arith.extui(i64, mul(number, 2)))
                        store_number(pointer(place, GLOBAL), element_of(value_.registers[at], n))
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread_index(), i32(4))):
                        place = arith.addi(scalars, arith.extui(i64, mul(column, 4)))
                        pair = log_sum_.registers.flat[run]
                        store_number(pointer(place, GLOBAL), element_of(pair, n))

    store(*targets, value, log_sum, entry, row, head, alive)


def columns(C: int, of):
    """A [C] array in the layout COLUMNS; ``of(run)`` is a pair of each run of eight columns."""
    layout = COLUMNS.to_mgpu()
    registers = np.empty(layout.registers_shape((C,)), dtype=object)
    assert registers.size == C // 8
    registers.flat = [of(run) for run in range(C // 8)]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def places_of_run(array, run: int) -> list[tuple[int, ...]]:
    """Where a tile's registers for a run of eight columns are, from the first rows on: at[0] counts
    64 rows, at[4] is 1 for a thread's second rows."""
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [at for at in np.ndindex(shape) if at[1] == run]


def two_rows(array, run: int):
    """A thread's pairs of its first and second rows of [64, C]."""
    first, second = (array.registers[at] for at in places_of_run(array, run))
    return first, second


def store_number(pointer, value) -> None:
    """One number to memory."""
    llvm.store(value, pointer, alignment=mgpu.utils.bitwidth(value.type) // 8)


def element_of(pair, n: int):
    """Number n of a vector."""
    return vector.extract(pair, [], ir.DenseI64ArrayAttr.get([n]))


def inserted(value, pair, n: int):
    """The vector with ``value`` for number n."""
    return vector.insert(value, pair, [], ir.DenseI64ArrayAttr.get([n]))


def pair_type(element):
    """The type of two numbers."""
    return ir.VectorType.get((2,), element)
