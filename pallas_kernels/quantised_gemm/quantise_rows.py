"""Quantises rows to float8_e4m3fn on Hopper, one launch (Mosaic GPU).

One CTA handles one row: it reads the row once, keeps it in registers, reduces its largest absolute
value over the threads, and writes values and scale. Bytes moved: 3 * E a row and its scale.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.mosaic_emit import THREADS, store_strided, widest_vector
from rjax.pallas_kernels.quantised_gemm.quantised_rows import (
    LARGEST,
    MIN_ABS_MAX,
    QuantisedRows,
    padded_rows,
)

_MAX_COLUMNS = 16384  # 128 elements per thread


def refusal(E: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot take rows of E elements of ``dtype``, or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"rows of {jnp.dtype(dtype)}; the mosaic backend needs a 16-bit dtype"
    if E % (2 * THREADS) or E > _MAX_COLUMNS:
        return (
            f"rows of {E} elements; the mosaic backend takes multiples of {2 * THREADS} up to "
            f"{_MAX_COLUMNS}"
        )
    return None


def quantise_rows(h: Float[Array, "T E"]) -> QuantisedRows:
    """The rows with a scale for each token; the largest value of a row becomes 448.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, E = h.shape
    why = refusal(E, h.dtype)
    if why is not None:
        raise ValueError(why)
    strided = plgpu.Layout.WG_STRIDED((E,), vec_size=widest_vector(E))

    def quantise_rows_kernel(h_ref, values_ref, scale_ref):
        """GMEM: h [T, E], values [T, E], scale [1, R]."""
        row = lax.axis_index("row")
        value = plgpu.load(h_ref.at[row], layout=strided).astype(jnp.float32)
        largest = jnp.maximum(jnp.max(jnp.abs(value)), MIN_ABS_MAX)
        values = (value * (LARGEST / largest)).astype(jnp.float8_e4m3fn)
        store_strided(values_ref.at[row], values, strided)
        scale_ref[0, row] = largest * (1 / LARGEST)

    values, scale = plgpu.kernel(
        quantise_rows_kernel,
        out_type=(
            jax.ShapeDtypeStruct((T, E), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((1, padded_rows(T)), jnp.float32),
        ),
        grid=(T,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(h)
    return QuantisedRows(values, scale, h.dtype)
