"""Relay fusion that quantises the merged rows to float8_e4m3fn on Hopper, in one launch.

One CTA handles one row, each warpgroup up to 1024 of its elements (``relay_fusion``). They exchange
their largest absolute values through shared memory, so that the row has one scale. Bytes moved:
each partial result once, E a row and its scale.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array

from rjax.pallas_kernels.attention.relay_fusion.mosaic import merge_entries, merge_vector
from rjax.pallas_kernels.gemm.base import LinearProblem, streaming_kernel
from rjax.pallas_kernels.gemm.few_bits import quantised_gemm
from rjax.pallas_kernels.gemm.few_bits.quantised_rows import (
    LARGEST,
    MIN_ABS_MAX,
    QuantisedRows,
    channels_refusal,
    quantised_shapes,
)
from rjax.pallas_kernels.gemm.gemv_row import read_chunk, reduce_warpgroup, strided
from rjax.pallas_kernels.mosaic.emit import SCALAR, THREADS, begin_kernel, store_strided
from rjax.pallas_kernels.pending import Partial, UnmergedAttention

_MAX_WARPGROUPS = 4  # of a CTA: with more, a thread has too few registers for its loads


def refusal(width: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot take rows of N * H = ``width`` elements of ``dtype``, or None.

    H is a multiple of 8, as in all attention of this backend.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return f"rows of {jnp.dtype(dtype)}; relay fusion on mosaic needs a 16-bit dtype"
    if width % THREADS:
        return f"rows of {width} elements; the kernel takes multiples of {THREADS}"
    if _warpgroups(width) > _MAX_WARPGROUPS:
        return f"rows of {width} elements; the kernel takes at most {_MAX_WARPGROUPS * 1024}"
    return None


def merge_quantise(attention: UnmergedAttention) -> QuantisedRows:
    """The merged rows [T, N * H] with a scale for each: ``quantise_rows`` after ``merge_rows``.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    out, partial_out = attention.out, attention.partial_out
    T, N, H = out.shape
    width, dtype = N * H, out.dtype
    why = refusal(width, dtype)
    if why is not None:
        raise ValueError(why)
    step, warpgroups = merge_vector(width), _warpgroups(width)
    size = step * THREADS

    def merge_quantise_kernel(
        indptr, out_ref, outs, lses, values_ref, scale_ref, *, scratch, largest_smem, arrived
    ):
        """GMEM: indptr int32 [T + 1], out [T, N * H], outs [X, N * H], lses [X, N], values
        [T, N * H], scale [1, R]. SMEM: scratch [warpgroups, 4], largest_smem [warpgroups]."""
        begin_kernel()
        row, wg = lax.axis_index("row"), lax.axis_index("wg")
        begin, end = indptr[row], indptr[row + 1]
        # The last chunk overlaps the one before.
        first = pl.multiple_of(jnp.minimum(wg * size, width - size), step)

        def quantise(value):
            value = value.astype(jnp.float32)
            largest = reduce_warpgroup("max", jnp.abs(value), strided(step), scratch.at[wg])
            _store(largest_smem, largest, wg)
            plgpu.barrier_arrive(arrived)
            plgpu.barrier_wait(arrived)
            found = [_load(largest_smem, i) for i in range(warpgroups)]
            largest = functools.reduce(jnp.maximum, found, MIN_ABS_MAX)
            values = (value * (LARGEST / largest)).astype(values_ref.dtype)
            store_strided(values_ref.at[row, pl.ds(first, size)], values, strided(step))

            @pl.when(wg == 0)
            def _():
                scale_ref[0, row] = largest * (1 / LARGEST)

        pl.when(end - begin == 1)(lambda: quantise(read_chunk(out_ref.at[row], first, step)))

        @pl.when(end - begin != 1)
        def _():
            def store(merged, _):
                quantise(merged.astype(dtype))

            merge_entries(outs, lses, begin, end, first, step, H, store)

    values, scale = plgpu.kernel(
        merge_quantise_kernel,
        out_type=quantised_shapes(T, width),
        scratch_types=dict(
            scratch=plgpu.SMEM((warpgroups, 4), jnp.float32),
            largest_smem=plgpu.SMEM((warpgroups,), jnp.float32),
            arrived=plgpu.Barrier(num_arrivals=warpgroups),
        ),
        grid=(T,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(
        attention.merge_indptr,
        out.reshape(T, width),
        partial_out.reshape(len(partial_out), width),
        attention.partial_lse,
    )
    return QuantisedRows(values, scale, dtype)


def _warpgroups(width: int) -> int:
    return -(-width // (merge_vector(width) * THREADS))


def _store(ref, value, at) -> None:
    """``ref[at] = value``, float32 [X] SMEM and a scalar that all threads have."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def store(_, ref_, value_, at_):
        index = ir.IndexType.get()
        [place] = at_.registers.flat
        memref.store(value_.registers.flat[0], ref_, [arith.index_cast(index, place)])

    store(ref, value, at)


def _load(ref, at: int):
    """``ref[at]``, float32 [X] SMEM."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
    )
    def load(_, ref_):
        value = memref.load(ref_, [mgpu.c(at, ir.IndexType.get())])
        return mgpu.FragmentedArray.splat(value, (), SCALAR.to_mgpu(), is_signed=None)

    return load(ref)


def _refusal(problem: LinearProblem) -> str | None:
    why = channels_refusal(problem) or refusal(problem.depth, problem.dtype)
    return why or quantised_gemm.linear_refusal(problem)


def _run(problem: LinearProblem, attention: UnmergedAttention, leaves: dict[str, Array]) -> Partial:
    return quantised_gemm.run_linear(problem, merge_quantise(attention), leaves)


KERNEL = streaming_kernel("merge_quantised_gemm", "merge_linear", _refusal, _run)
