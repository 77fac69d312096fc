"""mxfp4: the microscaling format of OCP, as gpt-oss is published."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num

from rjax.models.schemes.scaled import Scaled, register_values
from rjax.models.schemes.values import ScaleDType, Values
from rjax.pallas_kernels.gemm.few_bits.interleaving import INTERLEAVED

EXPONENT_BIAS = 127
"""Exponent bias of a scale: the number e means 2 ** (e - 127)."""
LARGEST_EXPONENT = 128
"""The largest exponent of a scale that kernels take: a scale of 2."""

MXFP4 = Scaled("mxfp4", (1, 32), scale_dtype="uint8")
"""float4_e2m1fn with a power of two for each 32 inputs; kernels take it for experts."""


class Mxfp4(Values):
    """float4_e2m1fn with powers of two as scales.

    The bits of a value are stored as an int4, and the exponent of a scale as uint8
    (float8_e8m0fnu).
    """

    def widened(self, values: Num[Array, "..."]) -> Float[Array, "..."]:
        """Values in float32, from their bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign."""
        bits = values.astype(jnp.int8)
        size = (bits & 7).astype(jnp.float32)
        size = jnp.where(size < 4, size / 2, jnp.where(size < 6, size - 2, 2 * size - 8))
        return jnp.where(bits < 0, -size, size)

    def widened_scale(self, scale: Num[Array, "..."]) -> Float[Array, "..."]:
        """Scales in float32, from their exponents."""
        return jnp.ldexp(jnp.float32(1), scale.astype(jnp.int32) - EXPONENT_BIAS)

    def quantise(
        self, weight: Float[Array, "X E"], block: tuple[int, int], scale_dtype: ScaleDType
    ) -> tuple[jax.Array, jax.Array]:
        """See the base class; the largest value of a group is rounded as the others are.

        It becomes 4 or 6: the scale is the one of OCP's "Microscaling Formats (MX) Specification",
        or twice as much where the largest would be clipped from 7 or more. Weights beyond 12 are
        clipped, since kernels take no scale above 2.
        """
        del scale_dtype
        groups = weight.reshape(weight.shape[0], -1, block[1])
        # Rounded to two bits as e2m1 is, so that 7 counts as 8.
        largest = lax.reduce_precision(
            jnp.abs(groups).max(axis=2), exponent_bits=8, mantissa_bits=1
        )
        of_largest = lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponent = jnp.clip(of_largest - 2, 0, LARGEST_EXPONENT)  # of a group of zeros, it is 0
        # The bits of 1 / scale, a normal number; products with powers of two are exact.
        inverse = lax.bitcast_convert_type((2 * EXPONENT_BIAS - exponent) << 23, jnp.float32)
        size = jnp.abs(groups) * inverse[..., None]
        # The steps of e2m1 are 1/2 below 2, 1 below 4, and 2 to 6; halves go to even bits.
        step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
        size = jnp.minimum(jnp.round(size / step) * step, self.largest)
        bits = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
        bits = bits.astype(jnp.int8) - 8 * jnp.signbit(groups).astype(jnp.int8)
        return bits.reshape(weight.shape).astype(self.dtype), exponent.astype(jnp.uint8)


register_values(
    Mxfp4(
        "mxfp4",
        np.dtype(ml_dtypes.int4),
        largest=6.0,
        random_scale=120.0,
        interleaved=INTERLEAVED,
        interleaved_experts=INTERLEAVED,
        experts_only=True,
    ),
    on_load=MXFP4,
)
