"""The sum of a row's numbers over the warpgroups of a CTA, or of a cluster of CTAs."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import functools

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from rjax.pallas_kernels.mosaic.emit import SCALAR, i32, i32_type
from rjax.pallas_kernels.mosaic.words import load_vector
from rjax.pallas_kernels.residual.exchange import numbers_of

_WARP = 32
_NUMBER_BYTES = 4


def row_sum(value, scratch, layout, warpgroups: int, ctas: int):
    """The sum of float32 ``value`` (in ``layout``) over all warpgroups; every thread gets it.

    With several CTAs, a cluster, each CTA reads the scratch of the others. It must call
    `leave_cluster` before it ends.

    Args:
        value: float32, the numbers of this warpgroup.
        scratch: SMEM, float32 [4 * warpgroups]. The next call must have another one: a slow thread
            may still read this one.
        layout: the layout of ``value``.
        warpgroups: number of warpgroups of a CTA.
        ctas: number of CTAs that share the row.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
    )
    def emit(_, scratch_, value_):
        total = None
        for register in value_.registers.flat:
            for number in numbers_of(register):
                total = number if total is None else arith.addf(total, number)
        distance = _WARP // 2
        while distance:
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            distance //= 2
        index = ir.IndexType.get()
        thread = mgpu.utils.thread_idx()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, i32(_WARP)), i32(0))
        warp = arith.index_cast(index, arith.divui(thread, i32(_WARP)))
        with mgpu.when(is_first):
            memref.store(total, scratch_, [warp])
        if ctas > 1:
            _cluster_barrier("barrier.cluster.arrive.release.aligned;")
            _cluster_barrier("barrier.cluster.wait.acquire.aligned;")
            numbers = [n for cta in range(ctas) for n in _loaded(scratch_, cta, 4 * warpgroups)]
            _cluster_barrier("barrier.cluster.arrive.release.aligned;")
        else:
            gpu.barrier()
            numbers = [memref.load(scratch_, [mgpu.c(i, index)]) for i in range(4 * warpgroups)]
        return mgpu.FragmentedArray.splat(functools.reduce(arith.addf, numbers), (), is_signed=None)

    return emit(scratch, value)


def leave_cluster() -> None:
    """Wait until the other CTAs of the cluster have read the scratch of `row_sum`."""

    @plgpu.inline_mgpu()
    def emit(_):
        _cluster_barrier("barrier.cluster.wait.acquire.aligned;")

    emit()


def _cluster_barrier(instruction: str) -> None:
    # Convergent: LLVM would otherwise copy it into both branches of a condition before it.
    void, options = ir.Type.parse("!llvm.void"), {"has_side_effects": True, "convergent": True}
    llvm.inline_asm(void, [], instruction, "~{memory}", **options)


def _loaded(scratch, cta: int, count: int):
    """``count`` float32 numbers from the scratch of a CTA of the cluster."""
    place = llvm.ptrtoint(i32_type(), mgpu.utils.memref_ptr(scratch))
    form = "mapa.shared::cluster.u32 $0, $1, $2;"
    place = llvm.inline_asm(i32_type(), [place, i32(cta)], form, "=r,r,r")
    words = [
        word
        for first in range(0, count, 4)
        for word in load_vector("ld.shared::cluster", place, 4, _NUMBER_BYTES * first)
    ]
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]
