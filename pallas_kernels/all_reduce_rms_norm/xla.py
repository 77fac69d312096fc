"""Sum of the devices' shares in plain JAX, under ``shard_map``.

The order of the sums is that of the Mosaic kernel: a device adds its own summands from the first to
the last, then the shares of devices 0, 1, 2, ... are added, all in float32. Every device has the
same bits.
"""

import functools
import operator

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from rjax.pallas_kernels.partial import Partial
from rjax.pallas_kernels.peer_exchange.peers import MAX_PUSHED_BYTES


def all_reduce(update: Partial, axis: str) -> Float[Array, "T ..."]:
    """The sum over the devices of the mesh axis, in the dtype of the result, bias added.

    Up to ``MAX_PUSHED_BYTES`` each device gets the shares of all others. With more bytes each gets
    one part of them along the last axis, and then the sums of the other parts.
    """
    share = functools.reduce(operator.add, list(update.summands))
    devices = lax.axis_size(axis)
    width = share.shape[-1]
    if (devices - 1) * share.size * 4 <= MAX_PUSHED_BYTES or width % devices:
        total = _ordered_sum(lax.all_gather(share, axis)).astype(update.dtype)
    else:
        parts = share.reshape(*share.shape[:-1], devices, width // devices)
        received = lax.all_to_all(jnp.moveaxis(parts, -2, 0), axis, 0, 0)
        part = _ordered_sum(received).astype(update.dtype)
        total = lax.all_gather(part, axis, axis=part.ndim - 1, tiled=True)
    return total if update.bias is None else total + update.bias


def _ordered_sum(shares: Float32[Array, "X ..."]) -> Float32[Array, "..."]:
    return functools.reduce(operator.add, list(shares))
