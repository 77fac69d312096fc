"""Residual sum and RMSNorm on Hopper, one launch (Mosaic GPU).

A program takes one row: it reads x and the update (or its parts) once, keeps the sum in registers,
reduces its squares over the threads, and writes the sum and the normed row. Bytes moved:
4 * D * itemsize a row, or with X parts (3 * itemsize + 4 * X) * D, and the weight.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.mosaic_emit import THREADS, store_strided, widest_vector


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | Float[Array, "X T D"],
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Args:
        x: bfloat16 or float16; D is a multiple of 128.
        update: in x's dtype, or in parts (``split_product``), whose sum is rounded to it.
        weight: any float dtype.
        eps: added to the mean of the squares.

    Raises:
        ValueError: a shape or dtype the kernel does not take.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    T, D = x.shape
    parts = update.shape[0] if update.ndim == 3 else None
    if x.dtype.itemsize != 2 or update.dtype != (jnp.float32 if parts else x.dtype):
        raise ValueError(
            f"x is {x.dtype} and update {update.dtype}; the mosaic backend needs one 16-bit dtype, "
            "or an update in parts of float32"
        )
    if D % THREADS:
        raise ValueError(f"rows of {D} numbers; the mosaic backend takes multiples of {THREADS}")
    strided = plgpu.Layout.WG_STRIDED((D,), vec_size=widest_vector(D))

    def add_rms_norm_kernel(x_ref, update_ref, weight_ref, total_ref, normed_ref):
        """GMEM: x [T, D], update [T, D] or [X, T, D], weight [D], total, normed [T, D]."""
        row = lax.axis_index("row")

        def read(ref):
            return plgpu.load(ref, layout=strided).astype(jnp.float32)

        scale = read(weight_ref)
        if parts is None:
            update = read(update_ref.at[row])
        else:
            update = read(update_ref.at[0, row])
            for i in range(1, parts):
                update = update + read(update_ref.at[i, row])
            update = update.astype(x.dtype).astype(jnp.float32)
        total = (read(x_ref.at[row]) + update).astype(x.dtype)
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
