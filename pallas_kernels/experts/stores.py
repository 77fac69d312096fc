"""Stores of a grouped GEMM's sums, which have columns first and rows last."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from rjax.pallas_kernels.mosaic.emit import SCALAR, i32_type

_PER_SLOT = plgpu.Layout.WGMMA.reduce(0)


def store_slots(ref, value, slot, column) -> None:
    """``ref[slot + row, column + c] = value[c, row]``.

    ref: [slots, E] in GMEM; value: [64, R] in WGMMA layout, of ref's dtype; slot, column: int32.
    Eight threads store eight consecutive columns.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def store(_, ref_, value_, slot_, column_):
        index = ir.IndexType.get()
        first_row, first = (
            arith.index_cast(index, at.registers.flat[0]) for at in (slot_, column_)
        )
        indices = value_.layout.thread_idxs(value_.shape)
        for (at, row), register in zip(indices, value_.registers.flat, strict=True):
            place = arith.addi(first, at)
            for i in range(value_.layout.vector_length):
                slot_row = arith.addi(arith.addi(first_row, row), mgpu.c(i, index))
                memref.store(vector.extract(register, [], [i]), ref_, [slot_row, place])

    store(ref, value, slot, column)


def load_pairs(pairs, weights, slot, rows: int):
    """(pairs, their weights) of ``rows`` slots from ``slot`` on; any weight for an empty slot.

    pairs: int32 [slots] and weights: float32 [T * X], in GMEM; slot: int32. Both results are
    [rows], as the rows of a WGMMA layout.
    """
    results = tuple(
        plgpu.ShapeDtypeStruct((rows,), dtype, layout=_PER_SLOT)
        for dtype in (jnp.int32, jnp.float32)
    )

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=results)
    def load(_, pairs_, weights_, slot_):
        index, f32 = ir.IndexType.get(), ir.F32Type.get()
        layout = _PER_SLOT.to_mgpu()
        [first] = slot_.registers.flat
        found, factors = [], []
        for (at,) in layout.thread_idxs((rows,)):
            start = arith.addi(arith.index_cast(index, first), at)
            places = [arith.addi(start, mgpu.c(i, index)) for i in range(layout.vector_length)]
            found.append([memref.load(pairs_, [place]) for place in places])
        for each in found:
            of_pairs = [arith.maxsi(pair, mgpu.c(0, i32_type())) for pair in each]
            factors.append(
                [memref.load(weights_, [arith.index_cast(index, pair)]) for pair in of_pairs]
            )

        def array(vectors, dtype, is_signed):
            shape = layout.registers_shape((rows,))
            registers = np.empty(shape, object)
            vector_type = ir.VectorType.get((layout.vector_length,), dtype)
            registers.flat = [vector.from_elements(vector_type, each) for each in vectors]
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)

        return array(found, i32_type(), True), array(factors, f32, None)

    return load(pairs, weights, slot)


def store_pairs(ref, value, pairs, weights, column) -> None:
    """``ref[p % X, p // X, column + c] = value[c, row] * weights[row]``, p = pairs[row].

    Rows with a negative p are not stored.

    ref: float32 [X, T, D] in GMEM; value: float32 [64, R] in WGMMA layout; pairs and weights: [R],
    the results of `load_pairs`; column: int32.
    """
    top_k = ref.shape[0]

    arguments = (plgpu.RefType(), plgpu.Layout.WGMMA, _PER_SLOT, _PER_SLOT, SCALAR)

    @plgpu.inline_mgpu(arg_types=arguments)
    def store(_, ref_, value_, pairs_, weights_, column_):
        index = ir.IndexType.get()
        first = arith.index_cast(index, column_.registers.flat[0])
        columns = [at for at, _ in value_.layout.thread_idxs(value_.shape)]
        # Two registers, of the upper and the lower 8 columns, have the rows of one of the pairs.
        registers = value_.registers.reshape(-1, 2)
        places = np.array(columns, object).reshape(registers.shape)
        for of_rows, at, pair_vector, weight_vector in zip(
            registers, places, pairs_.registers.flat, weights_.registers.flat, strict=True
        ):
            for i in range(_PER_SLOT.to_mgpu().vector_length):
                pair = vector.extract(pair_vector, [], [i])
                weight = vector.extract(weight_vector, [], [i])
                exists = arith.cmpi(arith.CmpIPredicate.sge, pair, mgpu.c(0, i32_type()))
                pair = arith.index_cast(index, pair)
                summand = arith.remui(pair, mgpu.c(top_k, index))
                row = arith.divui(pair, mgpu.c(top_k, index))
                with mgpu.when(exists):
                    for register, place in zip(of_rows, at, strict=True):
                        element = arith.mulf(vector.extract(register, [], [i]), weight)
                        memref.store(element, ref_, [summand, row, arith.addi(first, place)])

    store(ref, value, pairs, weights, column)
