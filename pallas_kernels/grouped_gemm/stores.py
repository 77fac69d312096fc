"""Stores of a grouped GEMM's sums, which have columns first and rows last."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from rjax.pallas_kernels.mosaic_emit import SCALAR, i32_type


def store_slots(ref, value, slot, column) -> None:
    """``ref[slot + row, column + c] = value[c, row]``.

    ref: [slots, E] in GMEM; value: [64, R] in WGMMA layout, of ref's dtype; slot, column: int32.
    Eight threads store eight consecutive columns.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def store(_, ref_, value_, slot_, column_):
        for row, at, element in _elements(value_, slot_, column_):
            memref.store(element, ref_, [row, at])

    store(ref, value, slot, column)


def store_pairs(ref, value, pairs, weights, slot, column) -> None:
    """``ref[p % X, p // X, column + c] = value[c, row] * weights[p]``, p = pairs[slot + row].

    Rows with a negative p are not stored.

    ref: float32 [X, T, D] in GMEM; value: float32 [64, R] in WGMMA layout; pairs: int32 [slots] and
    weights: float32 [T * X] in GMEM; slot, column: int32.
    """
    top_k = ref.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.Layout.WGMMA,
            plgpu.RefType(),
            plgpu.RefType(),
            SCALAR,
            SCALAR,
        )
    )
    def store(_, ref_, value_, pairs_, weights_, slot_, column_):
        index, i32 = ir.IndexType.get(), i32_type()
        # All loads before all stores, so that they are in flight together.
        found = []
        for row, at, element in _elements(value_, slot_, column_):
            pair = memref.load(pairs_, [row])
            exists = arith.cmpi(arith.CmpIPredicate.sge, pair, mgpu.c(0, i32))
            pair = arith.index_cast(index, arith.maxsi(pair, mgpu.c(0, i32)))
            found.append((exists, pair, at, element, memref.load(weights_, [pair])))
        for exists, pair, at, element, weight in found:
            of_row = arith.remui(pair, mgpu.c(top_k, index))
            row = arith.divui(pair, mgpu.c(top_k, index))
            with mgpu.when(exists):
                memref.store(arith.mulf(element, weight), ref_, [of_row, row, at])

    store(ref, value, pairs, weights, slot, column)


def _elements(value, slot, column):
    """(slot, column, element) of every element that a thread holds, slots and columns as index."""
    index = ir.IndexType.get()
    slot, column = (arith.index_cast(index, at.registers.flat[0]) for at in (slot, column))
    indices = value.layout.thread_idxs(value.shape)
    for (at, row), register in zip(indices, value.registers.flat, strict=True):
        [vector_size] = register.type.shape
        for i in range(vector_size):
            element = vector.extract(register, [], [i])
            own = arith.addi(arith.addi(slot, row), mgpu.c(i, index))
            yield own, arith.addi(column, at), element
