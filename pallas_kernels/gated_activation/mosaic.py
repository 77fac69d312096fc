"""Gated activation on Hopper (Mosaic GPU), which also fetches the next product's weights.

A program takes up to 1024 numbers of one row. Bytes moved: 3 * F * itemsize a row. It asks for its
share of the start of the next matrix product's weights in the L2 cache.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_emit import MOST_ROWS, THREADS, prefetch_to_l2

_WIDEST = 8  # numbers a thread: 16 bytes


def gated_silu(
    h: Float[Array, "T 2 F"], upcoming: Array | None = None, *, prefetch_bytes: int = 12 << 20
) -> Float[Array, "T F"]:
    """silu(h[:, 0]) * h[:, 1], in h's dtype, computed in float32 (SwiGLU; Shazeer, 2020).

    Args:
        h: bfloat16 or float16; F is a multiple of 8 and at least 128.
        upcoming: weights that the next kernel reads, to be fetched into the L2 cache, or None.
        prefetch_bytes: of ``upcoming`` at most.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, _, F = h.shape
    if h.dtype.itemsize != 2:
        raise ValueError(f"h is {h.dtype}; the mosaic backend needs a 16-bit dtype")
    if F % _WIDEST or F < THREADS:
        raise ValueError(
            f"rows of {F} numbers; the mosaic backend takes multiples of {_WIDEST} from {THREADS}"
        )
    vector = _WIDEST
    while vector * THREADS > F:
        vector //= 2
    size = vector * THREADS
    chunks = -(-F // size)  # the last one overlaps its neighbour
    strided = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    fetch = upcoming is not None and T <= MOST_ROWS

    def body(h_ref, *rest):
        """GMEM: h [T, 2, F], upcoming (any shape), then out [T, F]."""
        *ahead, out_ref = rest
        row, chunk = lax.axis_index("row"), lax.axis_index("chunk")
        first = pl.multiple_of(jnp.minimum(chunk * size, F - size), vector)

        def read(which):
            part = h_ref.at[row, which, pl.ds(first, size)]
            return plgpu.load(part, layout=strided).astype(jnp.float32)

        gate, up = read(0), read(1)
        for ref in ahead:
            prefetch_to_l2(ref, row * chunks + chunk, T * chunks, prefetch_bytes)
        hidden = gate / (1.0 + jnp.exp(-gate)) * up
        out_ref[row, pl.ds(first, size)] = hidden.astype(h.dtype)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((T, F), h.dtype),
        grid=(T, chunks),
        grid_names=("row", "chunk"),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(h, *((upcoming,) if fetch else ()))
