"""SwiGLU activation on Hopper, one launch (Mosaic GPU).

One CTA computes up to 1024 numbers of one row. Bytes moved: 3 * F * itemsize a row.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.mosaic_emit import THREADS, store_strided

_WIDEST = 8  # numbers a thread: 16 bytes


def refusal(F: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot take F columns in ``dtype``, or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"h is {jnp.dtype(dtype)}; the mosaic backend needs a 16-bit dtype"
    if F % _WIDEST or F < THREADS:
        return (
            f"rows of {F} numbers; the mosaic backend takes multiples of {_WIDEST} from {THREADS}"
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
    vector = _WIDEST
    while vector * THREADS > F:
        vector //= 2
    size = vector * THREADS
    chunks = -(-F // size)  # the last one overlaps its neighbour
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

    def silu_and_mul_kernel(h_ref, out_ref):
        """GMEM: h [T, 2, F], out [T, F]."""
        row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
        first = pl.multiple_of(jnp.minimum(chunk * size, F - size), vector)

        def read(which):
            part = h_ref.at[row, which, pl.ds(first, size)]
            return plgpu.load(part, layout=strided).astype(jnp.float32)

        gate, up = read(0), read(1)
        hidden = gate / (1.0 + jnp.exp(-gate)) * up
        store_strided(out_ref.at[row, pl.ds(first, size)], hidden.astype(h.dtype), strided)

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
