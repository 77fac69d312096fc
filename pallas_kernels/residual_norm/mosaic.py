"""Residual sum and RMSNorm on Hopper, one launch (Mosaic GPU).

A program takes one row: it reads x and the update once, keeps the sum in registers, reduces its
squares over the threads, and writes the sum and the normed row. Bytes moved: 4 * D * itemsize a
row, and the weight.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_emit import THREADS, store_strided, widest_vector


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"],
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Args:
        x, update: bfloat16 or float16; D is a multiple of 128.
        weight: any float dtype.
        eps: added to the mean of the squares.

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
    strided = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

    def add_rms_norm_kernel(x_ref, update_ref, weight_ref, total_ref, normed_ref):
        """GMEM: x, update [T, D], weight [D], total, normed [T, D]."""
        row = lax.axis_index("row")

        def read(ref):
            return plgpu.load(ref, layout=strided).astype(jnp.float32)

        scale = read(weight_ref)
        total = (read(x_ref.at[row]) + read(update_ref.at[row])).astype(x.dtype)
        store_strided(total_ref.at[row], total, strided)
        y = total.astype(jnp.float32)
        mean = jnp.sum(y * y) * (1.0 / D)
        normed = (y * lax.rsqrt(mean + eps) * scale).astype(x.dtype)
        store_strided(normed_ref.at[row], normed, strided)

    shape = jax.ShapeDtypeStruct((T, D), x.dtype)
    return plgpu.kernel(
        add_rms_norm_kernel,
        out_type=(shape, shape),
        grid=(T,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, update, weight)
