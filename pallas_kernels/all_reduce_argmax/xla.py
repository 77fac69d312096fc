"""Index of the largest number of each row over the devices, with XLA's collectives."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def local_argmax(
    x: Float32[Array, "B W"], axis: str
) -> tuple[Float32[Array, " B"], Int32[Array, " B"]]:
    """(the largest number of each row of this device, its index over all devices).

    Among equal numbers, the first counts. Runs under ``shard_map``; the devices of the axis share
    the columns.
    """
    first = lax.axis_index(axis) * x.shape[1]
    return jnp.max(x, axis=-1), jnp.argmax(x, axis=-1).astype(jnp.int32) + first


def all_reduce_argmax(x: Float32[Array, "B W"], axis: str) -> Int32[Array, " B"]:
    """``jnp.argmax`` over the columns of all devices, with one all-gather.

    Among equal numbers, the first counts. Runs under ``shard_map``.
    """
    values, indices = local_argmax(x, axis)
    bits = lax.bitcast_convert_type(values, jnp.int32)
    found = lax.all_gather(jnp.stack([bits, indices]), axis)  # [devices, 2, B]
    values = lax.bitcast_convert_type(found[:, 0], jnp.float32)
    device = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(found[:, 1], device[None], axis=0)[0]
