"""Quantising a weight: round to nearest."""

import jax
import jax.numpy as jnp
import ml_dtypes
from jaxtyping import Array, Float

from rjax.models.schemes.scaled import VALUE_DTYPES, Scaled

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
        scheme: without zero points.
        block: (outputs, inputs) that share a scale; inputs are not looked at for channels.
    """
    assert not scheme.zero_points
    outputs, inputs = weight.shape
    rows, columns = block if scheme.block[1] is not None else (1, inputs)
    blocks = weight.reshape(outputs // rows, rows, inputs // columns, columns)
    largest = jnp.abs(blocks).max(axis=(1, 3))
    # Of zeros, any scale is right; it must not be zero.
    scale = jnp.where(largest == 0, 1.0, largest / _LARGEST[scheme.values])
    scale = scale.astype(scheme.scale_dtype)
    values = (blocks / scale.astype(jnp.float32)[:, None, :, None]).reshape(outputs, inputs)
    if scheme.values != "fp8":
        values = jnp.round(values)
    largest = _LARGEST[scheme.values]
    values = jnp.clip(values, -largest, largest).astype(VALUE_DTYPES[scheme.values])
    return {"weight": values, "weight_scale": scale if scheme.block[1] is not None else scale[:, 0]}
