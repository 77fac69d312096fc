"""fp8: float8_e4m3fn."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from rjax.models.schemes.scaled import Scaled, register_values
from rjax.models.schemes.values import Values
from rjax.pallas_kernels.gemm.few_bits.interleaving import INTERLEAVED_BYTES


class Fp8(Values):
    """Floats of 8 bits with a float scale."""

    def rounded(self, weight: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
        """weight / scale; the conversion to the dtype rounds it."""
        return weight / scale


register_values(
    Fp8(
        "fp8",
        np.dtype(ml_dtypes.float8_e4m3fn),
        largest=float(jnp.finfo(jnp.float8_e4m3fn).max),
        random_scale=1.0,
        random="normal",
        # The kernels of experts widen the values to 16 bits before they multiply.
        interleaved_experts=INTERLEAVED_BYTES,
    ),
    on_load=Scaled("fp8"),
)
