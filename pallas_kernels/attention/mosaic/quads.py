"""How tiles in the layout of the tensor cores meet memory: 16 bytes at a time.

In that layout the four threads of a quad share a row, and each holds two numbers of every run of
eight. Read or written like that, a warp's access touches eight rows for 16 bytes each. Exchanging
registers within the quad first gives each thread whole runs, a quarter as many accesses.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.attention.mosaic.config import ROWS
from pallas_kernels.mosaic_emit import (
    SCALAR,
    SHARED,
    address,
    div,
    i32,
    pointer,
    rem,
    thread_index,
)

_RUN = 8  # numbers of 16 bits in one run: a quad's in one row
_BYTES = 2  # of a number


def row_of(which: int):
    """int32 tile row of this thread's first (0) or second (1) rows."""
    thread = thread_index()
    warp, lane = div(thread, 32), rem(thread, 32)
    row = arith.addi(arith.muli(warp, i32(16)), div(lane, 4))
    return arith.addi(row, i32(8 * which))


def blocks(runs: int) -> list[tuple[int, int]]:
    """(first run, runs) of the blocks that quads exchange: four, and two where they remain."""
    assert runs % 2 == 0
    whole = runs // 4
    return [(4 * i, 4) for i in range(whole)] + ([(4 * whole, 2)] if runs % 4 else [])


def column_of(first: int, count: int):
    """int32 column at which this thread's part of an exchanged block starts."""
    place = rem(thread_index(), 4)
    if count == 4:  # a run each
        return arith.addi(arith.muli(place, i32(_RUN)), i32(first * _RUN))
    run, half = rem(place, 2), div(place, 2)
    column = arith.addi(arith.muli(run, i32(_RUN)), arith.muli(half, i32(_RUN // 2)))
    return arith.addi(column, i32(first * _RUN))


def exchange(words: list):
    """Between the tensor cores' order and memory's, of one block (2 or 4 int32); its own inverse.

    Four threads hold word j of run j, one each: the four words of run i go to thread i. Of two runs
    the even threads take the first: both threads of a pair hold four numbers in a row then.
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


def address_of(ref, element):
    """int64 address of a number of 16 bits, ``element`` (int32 or int64) after the ref's first."""
    i64 = ir.IntegerType.get_signless(64)
    if element.type != i64:
        element = arith.extsi(i64, element)
    return address(ref, arith.muli(element, mgpu.c(_BYTES, i64)))


def write(place, words: list, space: int) -> None:
    """The words to an address (int64) in a memory space, in one access."""
    kind = ir.VectorType.get((len(words),), ir.IntegerType.get_signless(32))
    value = llvm.mlir_undef(kind)
    for i, word in enumerate(words):
        value = vector.insert(
            word, value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])
        )
    llvm.store(value, pointer(place, space), alignment=4 * len(words))


def read(place, count: int, space: int) -> list:
    """``count`` words from an address, in one access."""
    kind = ir.VectorType.get((count,), ir.IntegerType.get_signless(32))
    value = llvm.load(kind, pointer(place, space), alignment=4 * count)
    return [
        vector.extract(value, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for i in range(count)
    ]


def registers_of(array, which: int) -> list[tuple[tuple[int, ...], ir.Value]]:
    """(place, register) of one of a thread's two rows, run by run.

    That is axis 4 of the layout's register grid.
    """
    shape = array.registers.shape
    assert shape[4] == 2 and len(shape) == 9, shape
    return [(at, array.registers[at]) for at in np.ndindex(shape) if at[4] == which]


def load_tile(source, rows, H: int, dtype):
    """[64, H] of 16-bit numbers from plain rows in shared memory, for the tensor cores.

    Rows at and past ``rows`` (int32, 1 or more) repeat the last one: threads that read the same
    address take one access together, so that a tile of few rows costs little.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, H), dtype, layout=layout),
    )
    def load(_, ref, rows_):
        [count] = rows_.registers.flat
        element = ir.MemRefType(ref.type).element_type
        pair = ir.VectorType.get((2,), element)
        last = arith.subi(count, i32(1))
        zero = vector.broadcast(pair, arith.constant(element, ir.FloatAttr.get(element, 0.0)))
        result = mgpu.FragmentedArray.splat(
            arith.constant(element, ir.FloatAttr.get(element, 0.0)), (ROWS, H), layout.to_mgpu()
        )
        assert all(r.type == zero.type for r in result.registers.flat)
        for which in range(2):
            places = [at for at, _ in registers_of(result, which)]
            start = arith.muli(arith.minsi(row_of(which), last), i32(H))
            for first, runs in blocks(H // _RUN):
                at = address_of(ref, arith.addi(start, column_of(first, runs)))
                for i, word in enumerate(exchange(read(at, runs, SHARED))):
                    result.registers[places[first + i]] = mgpu.utils.bitcast(word, pair)
        return result

    return load(source, rows)
