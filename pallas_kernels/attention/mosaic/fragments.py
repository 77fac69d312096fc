"""wgmma fragments: a thread's registers of a tile, and their way from and to memory.

In wgmma's register layout thread i of a warp holds rows i / 4 and i / 4 + 8 of the warp's 16 rows,
and of each the columns 2 * (i % 4) and the next one of every run of eight: the four threads of a
quad share a row. An access in that layout touches eight rows of 16 bytes a warp. Shuffles within
the quad first give each thread whole runs: a quarter as many accesses, of 16 bytes a thread. Used
for queries (SMEM to registers) and for results (registers to GMEM), 16 bits a number. The gathers
read 4 bytes a matrix row or column from GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from rjax.pallas_kernels.attention.mosaic.config import WGMMA_M
from rjax.pallas_kernels.mosaic.emit import (
    GLOBAL,
    SCALAR,
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

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""Layout of a number a matrix row, [64]."""
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a number a column, [C]: a pair of registers for every run of eight columns, the same in
all threads with equal i % 4."""

SWIZZLE_ATOM = 8
"""Rows of a swizzle atom in SMEM."""

_RUN = 8  # 16-bit numbers of one run: a quad's in one row
_ITEMSIZE = 2


def add_products(acc, *products):
    """acc + the sum of a @ b over the pairs (a, b) of products.

    acc: float32 [64 * n, C] in registers; a: 16-bit, in registers or SMEM; b: 16-bit SMEM.
    """

    def add(ref):
        for a, b in products:
            plgpu.wgmma(ref, a, b)

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))


def load_tile(source, rows, H: int, dtype):
    """The wgmma fragment [64, H] of plain rows, 16-bit [64, H] SMEM.

    Rows from ``rows`` (int32, at least 1) on repeat the last one before: threads that read the same
    address share one access, so that a tile of few rows costs little.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M, H), dtype, layout=layout),
    )
    def load(_, ref, rows_):
        [count] = rows_.registers.flat
        element = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), element)
        last = arith.subi(count, i32(1))
        zero = vector.broadcast(pair, arith.constant(element, ir.FloatAttr.get(element, 0.0)))
        result = mgpu.FragmentedArray.splat(
            arith.constant(element, ir.FloatAttr.get(element, 0.0)), (WGMMA_M, H), layout.to_mgpu()
        )
        assert all(r.type == zero.type for r in result.registers.flat)
        for which in range(2):
            places = [at for at, _ in row_registers(result, which)]
            start = arith.muli(arith.minsi(fragment_row(which), last), i32(H))
            for first, runs in exchange_blocks(H // _RUN):
                at = element_address(ref, arith.addi(start, block_column(first, runs)))
                for i, word in enumerate(exchange(read_words(at, runs, SHARED))):
                    result.registers[places[first + i]] = mgpu.utils.bitcast(word, pair)
        return result

    return load(source, rows)


def gather_rows(table, base, live, group: int):
    """``table[base + min(m // group, live - 1)]`` for the 64 matrix rows m of a tile.

    table: int32 [A] GMEM; base, live: int32 scalars, live >= 1. Returns int32 [64].
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.int32, layout=ROWS),
    )
    def gather(_, ref, base_, live_):
        [start], [rows] = base_.registers.flat, live_.registers.flat
        last = arith.subi(rows, i32(1))

        def element(m):
            row = div(arith.index_cast(i32_type(), m), group)
            row = arith.addi(start, arith.minsi(row, last))
            return memref.load(ref, [arith.index_cast(ir.IndexType.get(), row)])

        return mgpu.FragmentedArray.build((WGMMA_M,), ROWS.to_mgpu(), element, is_signed=True)

    return gather(table, base, live)


def gather_heads(table, head0, group: int):
    """``table[min(head0 + m % group, N - 1)]`` for the 64 matrix rows m of a tile.

    table: float32 [N] GMEM; head0: int32 scalar. Returns float32 [64], one value a matrix row.
    """
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROWS),
    )
    def gather(_, ref, head_):
        [start] = head_.registers.flat

        def element(m):
            member = rem(arith.index_cast(i32_type(), m), group)
            head = arith.minsi(arith.addi(start, member), i32(last))
            return memref.load(ref, [arith.index_cast(ir.IndexType.get(), head)])

        return mgpu.FragmentedArray.build((WGMMA_M,), ROWS.to_mgpu(), element)

    return gather(table, head0)


def gather_columns(table, head0, C: int):
    """``table[min(head0 + c, N - 1)]`` for C columns; table: float32 [N] GMEM, head0: int32."""
    last = table.shape[0] - 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def gather(_, ref, head_):
        [start] = head_.registers.flat
        lane = rem(thread_index(), 4)

        def of_run(run):
            pair = llvm.mlir_undef(pair_type(ir.F32Type.get()))
            for n in range(2):
                column = add(mul(lane, 2), 8 * run + n)
                head = arith.minsi(arith.addi(start, column), i32(last))
                [word] = read_words(address(ref, mul(head, 4)), 1, GLOBAL)
                pair = insert(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
            return pair

        return build_columns(C, of_run)

    return gather(table, head0)


def fragment_row(which: int):
    """int32 tile row of this thread's first (0) or second (1) rows."""
    thread = thread_index()
    warp, lane = div(thread, 32), rem(thread, 32)
    row = arith.addi(arith.muli(warp, i32(16)), div(lane, 4))
    return arith.addi(row, i32(8 * which))


def exchange_blocks(runs: int) -> list[tuple[int, int]]:
    """(first run, number of runs) of the blocks that quads exchange: fours, then a two."""
    assert runs % 2 == 0
    fours = runs // 4
    return [(4 * i, 4) for i in range(fours)] + ([(4 * fours, 2)] if runs % 4 else [])


def block_column(first: int, count: int):
    """int32 column at which this thread's part of an exchanged block starts."""
    lane = rem(thread_index(), 4)
    if count == 4:  # a run each
        return arith.addi(arith.muli(lane, i32(_RUN)), i32(first * _RUN))
    run, half = rem(lane, 2), div(lane, 2)
    column = arith.addi(arith.muli(run, i32(_RUN)), arith.muli(half, i32(_RUN // 2)))
    return arith.addi(column, i32(first * _RUN))


def exchange(words: list) -> list:
    """Convert one block between fragment order and memory order; its own inverse.

    words: 2 or 4 int32, word j of this thread in run j. With four runs, thread i of the quad gets
    the four words of run i. With two runs, the even threads get the first one: each pair of threads
    then holds four neighbouring numbers a thread.
    """
    words = list(words)
    for distance in (1, 2)[: len(words) // 2]:
        upper = arith.cmpi(
            arith.CmpIPredicate.ne, arith.andi(thread_index(), i32(distance)), i32(0)
        )
        for low in (i for i in range(len(words)) if not i & distance):
            high = low | distance
            sent = arith.select(upper, words[low], words[high])
            received = mgpu.utils.shfl_bfly(sent, distance)
            words[low] = arith.select(upper, received, words[low])
            words[high] = arith.select(upper, words[high], received)
    return words


def element_address(ref, element):
    """int64 address of a 16-bit number, ``element`` (int32 or int64) numbers after the first."""
    i64 = ir.IntegerType.get_signless(64)
    if element.type != i64:
        element = arith.extsi(i64, element)
    return address(ref, arith.muli(element, mgpu.c(_ITEMSIZE, i64)))


def write_words(place, words: list, space: int) -> None:
    """Store int32 words to an address (int64) of a memory space, in one access."""
    kind = ir.VectorType.get((len(words),), ir.IntegerType.get_signless(32))
    value = llvm.mlir_undef(kind)
    for i, word in enumerate(words):
        value = insert(word, value, i)
    llvm.store(value, pointer(place, space), alignment=4 * len(words))


def read_words(place, count: int, space: int) -> list:
    """Load ``count`` int32 words from an address (int64), in one access."""
    kind = ir.VectorType.get((count,), ir.IntegerType.get_signless(32))
    value = llvm.load(kind, pointer(place, space), alignment=4 * count)
    return [extract(value, i) for i in range(count)]


def row_registers(array, which: int) -> list[tuple[tuple[int, ...], ir.Value]]:
    """(index, register) of one of a thread's two rows, run by run.

    The row is axis 4 of the layout's register grid.
    """
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [(at, array.registers[at]) for at in np.ndindex(shape) if at[4] == which]


def build_columns(C: int, of_run: Callable) -> mgpu.FragmentedArray:
    """A [C] array in the layout COLUMNS; ``of_run(run)`` is the pair of a run of eight columns."""
    layout = COLUMNS.to_mgpu()
    registers = np.empty(layout.registers_shape((C,)), dtype=object)
    assert registers.size == C // 8
    registers.flat = [of_run(run) for run in range(C // 8)]
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def run_indices(array, run: int) -> list[tuple[int, ...]]:
    """Indices of a tile's registers for a run of eight columns, from the first rows on.

    In an index ``at``, ``at[0]`` counts 64 rows and ``at[4]`` is 1 for a thread's second row.
    """
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [at for at in np.ndindex(shape) if at[1] == run]


def row_pair(array, run: int):
    """A thread's registers of its first and its second row of [64, C]."""
    first, second = (array.registers[at] for at in run_indices(array, run))
    return first, second


def store_number(pointer, value) -> None:
    """Store one number to a pointer."""
    llvm.store(value, pointer, alignment=mgpu.utils.bitwidth(value.type) // 8)


def extract(pair, n: int):
    """Number n of a vector."""
    return vector.extract(pair, [], ir.DenseI64ArrayAttr.get([n]))


def insert(value, pair, n: int):
    """The vector with ``value`` for number n."""
    return vector.insert(value, pair, [], ir.DenseI64ArrayAttr.get([n]))


def pair_type(element):
    """The type of two numbers."""
    return ir.VectorType.get((2,), element)


def sum_eight_rows(sums):
    """float32 [C]: the sum over eight neighbouring rows of [64, C], which repeats every eight
    rows."""
    C = sums.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((C,), jnp.float32, layout=COLUMNS),
    )
    def combine(_, sums_):
        def of_run(run):
            total, _ = row_pair(sums_, run)
            for distance in (4, 8, 16):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            return total

        return build_columns(C, of_run)

    return combine(sums)


def swizzled_offset(row, column, width: int, itemsize: int):
    """Byte offset of a number in a tile of whole swizzle atoms, as TMA and wgmma see it.

    row, column: int32; width: numbers a row.
    """
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    atom, per_row = SWIZZLE_ATOM * swizzle, width * itemsize // swizzle
    column = mul(column, itemsize)
    place = arith.addi(mul(div(row, SWIZZLE_ATOM), per_row), div(column, swizzle))
    place = arith.addi(mul(place, atom), mul(rem(row, SWIZZLE_ATOM), swizzle))
    place = arith.addi(place, rem(column, swizzle))
    bits = arith.andi(arith.shrui(place, i32(7)), i32(swizzle // 16 - 1))
    return arith.xori(place, arith.shli(bits, i32(4)))
