"""Types of the values of a `Scaled` weight: what they mean, and how floats are rounded to them."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num

from rjax.models.schemes.scheme import Initial

ScaleDType = Literal["float32", "bfloat16", "float16", "uint8"]


@dataclasses.dataclass(frozen=True, slots=True)
class Values:
    """Signed integers with a float scale; other types override what differs.

    Attributes:
        name: the name for options, kernels and logs, such as "int8".
        dtype: dtype in which values are stored.
        largest: largest value.
        random_scale: scales of random weights, for a standard deviation of 0.02 together with the
            random values.
        random: initial values of random weights.
        interleaved: inputs that are reordered among themselves (`interleaving`), if a multiple of
            them is stored; None for plain order.
        interleaved_experts: the same for the weights of experts.
        experts_only: kernels take the type for experts only.
    """

    name: str
    dtype: np.dtype
    largest: float
    random_scale: float
    random: Initial = "integers"
    interleaved: int | None = None
    interleaved_experts: int | None = None
    experts_only: bool = False

    def widened(self, values: Num[Array, "..."]) -> Float[Array, "..."]:
        """Values in float32."""
        return values.astype(jnp.float32)

    def widened_scale(self, scale: Num[Array, "..."]) -> Float[Array, "..."]:
        """Scales in float32."""
        return scale.astype(jnp.float32)

    def quantise(
        self, weight: Float[Array, "X E"], block: tuple[int, int], scale_dtype: ScaleDType
    ) -> tuple[jax.Array, jax.Array]:
        """(values, one scale for each block) of a weight, rounded to nearest.

        The largest value of a block is kept.

        Args:
            weight: (outputs, inputs), float32.
            block: (outputs, inputs) that share a scale.
            scale_dtype: dtype of the scales.
        """
        (outputs, inputs), (rows, columns) = weight.shape, block
        blocks = weight.reshape(outputs // rows, rows, inputs // columns, columns)
        largest = jnp.abs(blocks).max(axis=(1, 3))
        # Of zeros, any scale is right; it must not be zero.
        scale = jnp.where(largest == 0, 1.0, largest / self.largest)
        scale = rounded_scale(scale, scale_dtype)
        values = self.rounded(blocks, scale.astype(jnp.float32)[:, None, :, None])
        values = jnp.clip(values, -self.largest, self.largest).reshape(outputs, inputs)
        return values.astype(self.dtype), scale

    def rounded(self, weight: Float[Array, "..."], scale: Float[Array, "..."]) -> Array:
        """weight / scale, rounded to an integer, halves to even ones.

        XLA may divide by multiplying by an inexact reciprocal, which moves halves to either side.
        They are many: weights and scales of bfloat16 have few bits. The remainder tells on which
        side they are; it is exact for such weights.
        """
        found = jnp.round(weight / scale)
        rest = weight - found * scale
        beyond = 2 * jnp.abs(rest) - scale
        odd = found.astype(jnp.int32) & 1 == 1
        return jnp.where((beyond > 0) | (beyond == 0) & odd, found + jnp.sign(rest), found)


def rounded_scale(scale: Float[Array, "..."], dtype: ScaleDType) -> Float[Array, "..."]:
    """A float32 scale in the dtype in which it is stored, from which values are to be rounded.

    XLA on GPUs drops a conversion that is converted back, and values would be rounded to multiples
    of the float32 scale. It keeps ``reduce_precision``.
    """
    # The exponent keeps float32's bits: float16's subnormal numbers would become 0.
    mantissa_bits = jnp.finfo(dtype).nmant
    return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=mantissa_bits).astype(dtype)
