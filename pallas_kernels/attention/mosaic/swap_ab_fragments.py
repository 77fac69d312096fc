"""Swap-AB fragments: tiles [64 * n, C] whose C columns are the heads of one query row.

wgmma's layout gives thread i of a warp rows i / 4 and i / 4 + 8 of the warp's 16 rows, and columns
2 * (i % 4) and the next one of every run of eight columns. A number a column is a pair of registers
for every run of eight, the same in all threads with equal i % 4. All functions here work on
registers, except ``gather_columns``, which reads 4 bytes a column from GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from rjax.pallas_kernels.attention.mosaic import fragment_io
from rjax.pallas_kernels.mosaic_emit import (
    GLOBAL,
    SCALAR,
    add,
    address,
    i32,
    mul,
    rem,
    thread_index,
)

_WGMMA = plgpu.Layout.WGMMA
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""Layout of a number a column, [C]."""


def sum_eight_rows(sums):
    """float32 [C]: the sum over eight neighbouring rows of [64, C], which repeats every eight
    rows."""
    C = sums.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA,),
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
                [word] = fragment_io.read_words(address(ref, mul(head, 4)), 1, GLOBAL)
                pair = insert(mgpu.utils.bitcast(word, ir.F32Type.get()), pair, n)
            return pair

        return build_columns(C, of_run)

    return gather(table, head0)


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
    """Store one number."""
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
