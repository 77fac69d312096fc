"""Fragment I/O: wgmma fragments to and from memory, 16 bytes a thread.

In wgmma's register layout the four threads of a quad share a row, and each holds two neighbouring
numbers of every run of eight. An access in that layout touches eight rows of 16 bytes a warp.
Shuffles within the quad first give each thread whole runs: a quarter as many accesses. Used for
queries (SMEM to registers) and for results (registers to GMEM), 16 bits a number.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from rjax.pallas_kernels.attention.mosaic.config import WGMMA_M
from rjax.pallas_kernels.mosaic_emit import (
    SCALAR,
    SHARED,
    address,
    div,
    i32,
    pointer,
    rem,
    thread_index,
)

_RUN = 8  # 16-bit numbers of one run: a quad's in one row
_ITEMSIZE = 2


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
        value = vector.insert(
            word, value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])
        )
    llvm.store(value, pointer(place, space), alignment=4 * len(words))


def read_words(place, count: int, space: int) -> list:
    """Load ``count`` int32 words from an address (int64), in one access."""
    kind = ir.VectorType.get((count,), ir.IntegerType.get_signless(32))
    value = llvm.load(kind, pointer(place, space), alignment=4 * count)
    return [
        vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for i in range(count)
    ]


def row_registers(array, which: int) -> list[tuple[tuple[int, ...], ir.Value]]:
    """(index, register) of one of a thread's two rows, run by run.

    The row is axis 4 of the layout's register grid.
    """
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [(at, array.registers[at]) for at in np.ndindex(shape) if at[4] == which]


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
