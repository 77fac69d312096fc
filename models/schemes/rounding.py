"""Quantising a weight: round to nearest."""

import jax
import jax.numpy as jnp
import ml_dtypes
from jax import lax
from jaxtyping import Array, Float

from rjax.models.schemes.scaled import (
    EXPONENT_BIAS,
    LARGEST_EXPONENT,
    VALUE_DTYPES,
    Scaled,
    ScaleDType,
)

_LARGEST = {
    "fp8": float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max),
    "int8": 127.0,
    "int4": 7.0,
}


def quantise(
    weight: Float[Array, "X E"], scheme: Scaled, block: tuple[int, int]
) -> dict[str, jax.Array]:
    """The arrays of a symmetric scheme, outputs first.

    The largest value of a block is kept; in mxfp4 it is rounded as the others are.

    Args:
        weight: (outputs, inputs), float32.
        scheme: a scheme without zero points.
        block: (outputs, inputs) that share a scale; inputs are not looked at for channels.
    """
    assert not scheme.zero_points
    if scheme.values == "mxfp4":
        return _quantise_mxfp4(weight, block[1])
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


def _quantise_mxfp4(weight: Float[Array, "X E"], group: int) -> dict[str, jax.Array]:
    """float4_e2m1fn with a power of two for each group of inputs, see `Scaled`.

    The largest value of a group becomes 4 or 6: its scale is the one of OCP's "Microscaling Formats
    (MX) Specification", or twice as much where the largest would be clipped from 7 or more. Weights
    beyond 12 are clipped, since kernels take no scale above 2.
    """
    groups = weight.reshape(weight.shape[0], -1, group)
    # Rounded to two bits as e2m1 is, so that 7 counts as 8.
    largest = lax.reduce_precision(jnp.abs(groups).max(axis=2), exponent_bits=8, mantissa_bits=1)
    of_largest = lax.bitcast_convert_type(largest, jnp.int32) >> 23
    exponent = jnp.clip(of_largest - 2, 0, LARGEST_EXPONENT)  # of a group of zeros, it is 0
    # The bits of 1 / scale, a normal number; products with powers of two are exact.
    inverse = lax.bitcast_convert_type((2 * EXPONENT_BIAS - exponent) << 23, jnp.float32)
    size = jnp.abs(groups) * inverse[..., None]
    # The steps of e2m1 are 1/2 below 2, 1 below 4, and 2 to 6; halves go to even bits.
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    size = jnp.minimum(jnp.round(size / step) * step, 6.0)
    bits = jnp.where(size < 2, 2 * size, jnp.where(size < 4, size + 2, size / 2 + 4))
    bits = bits.astype(jnp.int8) - 8 * jnp.signbit(groups).astype(jnp.int8)
    values = bits.reshape(weight.shape).astype(VALUE_DTYPES["mxfp4"])
    return {"weight": values, "weight_scale": exponent.astype(jnp.uint8)}


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
