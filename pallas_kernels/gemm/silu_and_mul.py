"""SwiGLU activation on Hopper, one launch (Mosaic GPU).

One CTA computes up to 1024 elements of one row. Bytes moved: 3 * F * itemsize a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.gemm.activation import swiglu
from rjax.pallas_kernels.gemm.base import LinearProblem, only_swiglu
from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import THREADS, begin_kernel, store_strided

_MAX_VECTOR = 8  # elements per thread: 16 bytes


def refusal(F: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot take F columns in ``dtype``, or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"h is {jnp.dtype(dtype)}; the mosaic backend needs a 16-bit dtype"
    if F % _MAX_VECTOR or F < THREADS:
        return (
            f"rows of {F} elements; the mosaic backend takes multiples of {_MAX_VECTOR} from "
            f"{THREADS}"
        )
    return None


def silu_and_mul(h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """silu(h[:, 0]) * h[:, 1], in h's dtype, computed in float32 (SwiGLU; Shazeer, 2020).

    Args:
        h: bfloat16 or float16; F is a multiple of 8 and at least 128.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, _, F = h.shape
    why = refusal(F, h.dtype)
    if why is not None:
        raise ValueError(why)
    vector = _MAX_VECTOR
    while vector * THREADS > F:
        vector //= 2
    size = vector * THREADS
    chunks = -(-F // size)  # the last one overlaps the one before
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def silu_and_mul_kernel(h_ref, out_ref):
        """GMEM: h [T, 2, F], out [T, F]."""
        begin_kernel()
        row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
        first = pl.multiple_of(jnp.minimum(chunk * size, F - size), vector)

        def read(which):
            chunk_ref = h_ref.at[row, which, pl.ds(first, size)]
            return plgpu.load(chunk_ref, layout=strided).astype(jnp.float32)

        hidden = swiglu(read(0), read(1)).astype(h.dtype)
        store_strided(out_ref.at[row, pl.ds(first, size)], hidden, strided)

    return plgpu.kernel(
        silu_and_mul_kernel,
        out_type=jax.ShapeDtypeStruct((T, F), h.dtype),
        grid=(T, chunks),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(h)


def _refusal(problem: LinearProblem) -> str | None:
    return only_swiglu(problem) or refusal(problem.columns[-1], problem.dtype)


def _run(problem: LinearProblem, h: Array) -> Array:
    del problem
    return silu_and_mul(h)


KERNEL = Kernel(
    "mosaic.silu_and_mul", "activation", "mosaic", _refusal, _run, compute_capabilities=HOPPER
)
