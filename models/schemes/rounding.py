"""Quantising a weight: round to nearest."""

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax
from jaxtyping import Array, Float

from rjax.models.schemes.scaled import VALUE_DTYPES, Scaled, ScaleDType

_LARGEST = {
    "fp8": float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max),
    "int8": 127.0,
    "int4": 7.0,
}


def quantise(
    weight: Float[Array, "X E"], scheme: Scaled, block: tuple[int, int]
) -> dict[str, jax.Array]:
    """The arrays of a symmetric scheme, outputs first; the largest value of a block is kept.

    Args:
        weight: (outputs, inputs), float32.
        scheme: a scheme without zero points.
        block: (outputs, inputs) that share a scale; inputs are not looked at for channels.
    """
    assert not scheme.zero_points
    outputs, inputs = weight.shape
    rows, columns = block if scheme.block[1] is not None else (1, inputs)
    blocks = weight.reshape(outputs // rows, rows, inputs // columns, columns)
    largest = jnp.abs(blocks).max(axis=(1, 3))
    # Of zeros, any scale is right; it must not be zero.
    scale = jnp.where(largest == 0, 1.0, largest / _LARGEST[scheme.values])
    scale = rounded_scale(scale, scheme.scale_dtype)
    of_blocks = scale.astype(jnp.float32)[:, None, :, None]
    values = blocks / of_blocks if scheme.values == "fp8" else _nearest(blocks, of_blocks)
    largest = _LARGEST[scheme.values]
    values = jnp.clip(values, -largest, largest).reshape(outputs, inputs)
    values = values.astype(VALUE_DTYPES[scheme.values])
    return {"weight": values, "weight_scale": scale if scheme.block[1] is not None else scale[:, 0]}


def rounded_scale(scale: Float[Array, "..."], dtype: ScaleDType) -> Float[Array, "..."]:
    """A float32 scale in the dtype in which it is stored, from which values are to be rounded.

    XLA on GPUs drops a conversion that is converted back, and values would be rounded to multiples
    of the float32 scale. It keeps ``reduce_precision``.
    """
    # The exponent keeps float32's bits: float16's subnormal numbers would become 0.
    mantissa_bits = jnp.finfo(dtype).nmant
    return lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=mantissa_bits).astype(dtype)


def _nearest(weight: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """weight / scale, rounded to an integer, halves to even ones.

    XLA may divide by multiplying by an inexact reciprocal, which moves halves to either side. They
    are many: weights and scales of bfloat16 have few bits. The remainder tells on which side they
    are; it is exact for such weights.
    """
    found = jnp.round(weight / scale)
    rest = weight - found * scale
    beyond = 2 * jnp.abs(rest) - scale
    odd = found.astype(jnp.int32) & 1 == 1
    return jnp.where((beyond > 0) | (beyond == 0) & odd, found + jnp.sign(rest), found)
