"""Residual sum and RMSNorm on Hopper, one launch (Mosaic GPU).

A program takes one row: it reads x and the update once, keeps the sum in registers, reduces its
squares over the threads, and writes the sum and the normed row. Bytes moved: 4 * D * itemsize a
row, and the weight. It also asks for the start of the next matrix product's weights in the L2
cache; where there are fewer rows than programs, the rest do only that.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_emit import MOST_ROWS, THREADS, prefetch_to_l2, widest_vector

_LEAST_PROGRAMS = 64


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"],
    weight: Float[Array, " D"],
    eps: float,
    upcoming: Array | None = None,
    *,
    prefetch_bytes: int = 12 << 20,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Args:
        x, update: bfloat16 or float16; D is a multiple of 128.
        weight: any float dtype.
        eps: added to the mean of the squares.
        upcoming: weights that the next kernel reads, to be fetched into the L2 cache, or None.
        prefetch_bytes: of ``upcoming`` at most.

    Raises:
        ValueError: a shape or dtype the kernel does not take.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    T, D = x.shape
    if x.dtype.itemsize != 2 or update.dtype != x.dtype:
        raise ValueError(
            f"x is {x.dtype} and update {update.dtype}; the mosaic backend needs one 16-bit dtype"
        )
    if D % THREADS:
        raise ValueError(f"rows of {D} numbers; the mosaic backend takes multiples of {THREADS}")
    fetch = upcoming is not None and T <= MOST_ROWS
    programs = max(T, _LEAST_PROGRAMS) if fetch else T
    strided = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

    def body(x_ref, update_ref, weight_ref, *rest):
        """GMEM: x, update [T, D], weight [D], upcoming (any shape), then total, normed [T, D]."""
        *ahead, total_ref, normed_ref = rest
        program = lax.axis_index("row")

        def work():
            def read(ref):
                return plgpu.load(ref, layout=strided).astype(jnp.float32)

            scale = read(weight_ref)
            total = (read(x_ref.at[program]) + read(update_ref.at[program])).astype(x.dtype)
            total_ref[program] = total
            y = total.astype(jnp.float32)
            mean = jnp.sum(y * y) * (1.0 / D)
            normed_ref[program] = (y * lax.rsqrt(mean + eps) * scale).astype(x.dtype)

        for ref in ahead:
            prefetch_to_l2(ref, program, programs, prefetch_bytes)
        if programs > T:
            pl.when(program < T)(work)
        else:
            work()

    shape = jax.ShapeDtypeStruct((T, D), x.dtype)
    return plgpu.kernel(
        body,
        out_type=(shape, shape),
        grid=(programs,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, update, weight, *((upcoming,) if fetch else ()))
