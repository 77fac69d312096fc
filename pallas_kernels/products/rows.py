"""Register-level reads and writes of the few rows that a 64-row tile holds."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from pallas_kernels.mosaic_emit import SCALAR
from pallas_kernels.products.tiling import ROWS

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


def read_tile(ref, start, columns: int):
    """``ref[row, start + column]`` as float32 [64, columns]; a ref [E] gives equal rows.

    ref: [T, E] or [E] in GMEM; rows past the last repeat it, columns past the last are 0.
    start: int32 scalar; columns: a multiple of 8.
    """
    *rows, width = ref.shape
    dtype = ref.dtype

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR),
        return_type=plgpu.ShapeDtypeStruct((ROWS, columns), dtype, layout=_TILE),
    )
    def read(_, ref_, start_):
        index = ir.IndexType.get()
        [first] = start_.registers.flat
        first = arith.index_cast(index, first)

        def element(row, column):
            place = arith.addi(first, column)
            inside = arith.cmpi(arith.CmpIPredicate.slt, place, mgpu.c(width, index))
            place = arith.minsi(place, mgpu.c(width - 1, index))
            lines = [arith.minsi(row, mgpu.c(T - 1, index)) for T in rows]
            found = memref.load(ref_, [*lines, place])
            return arith.select(inside, found, mgpu.c(0.0, found.type))

        return mgpu.FragmentedArray.build((ROWS, columns), _TILE.to_mgpu(), element)

    return read(ref, start).astype(jnp.float32)


def write_tile(ref, value, start):
    """``ref[row, start + column] = value[row, column]`` where there is such a place.

    ref: [T, E] in GMEM, value's dtype, E even; value: [64, columns] in WGMMA layout.
    """
    T, width = ref.shape
    ragged = width % value.shape[1] != 0

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _TILE, SCALAR))
    def write(_, ref_, value_, start_):
        index = ir.IndexType.get()
        [first] = start_.registers.flat
        first = arith.index_cast(index, first)
        shape = value_.registers.shape
        assert len(shape) == 9 and shape[4] == 2, shape
        registers = list(
            zip(
                np.ndindex(shape),
                value_.layout.thread_idxs(value_.shape),
                value_.registers.flat,
                strict=True,
            )
        )
        # A thread holds two rows, r and r + 8, two columns in each run of 8.
        for which in range(min(2, T // 8)):
            mine = [(place, reg) for at, place, reg in registers if at[4] == which]
            row = mine[0][0][0]
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(T, index))):
                for (_, column), register in mine:
                    place = arith.addi(first, column)
                    if not ragged:
                        vector.store(register, ref_, [row, place])
                        continue
                    inside = arith.cmpi(arith.CmpIPredicate.slt, place, mgpu.c(width, index))
                    with mgpu.when(inside):
                        vector.store(register, ref_, [row, place])

    write(ref, value, start)


def write_column(ref, value, column):
    """``ref[row, column] = value[row]`` for the rows there are; ref: float32 [T, P] in GMEM."""
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ROW, SCALAR))
    def write(_, ref_, value_, column_):
        index = ir.IndexType.get()
        [at] = column_.registers.flat
        at = arith.index_cast(index, at)
        rows = [row for (row,) in value_.layout.thread_idxs(value_.shape)]
        for row, register in zip(rows, value_.registers.flat, strict=True):
            if isinstance(register.type, ir.VectorType):
                register = vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([0]),
                )
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(T, index))):
                memref.store(register, ref_, [row, at])

    write(ref, value, column)
