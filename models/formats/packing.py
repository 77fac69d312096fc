"""Small integers in 32-bit words."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def unpack(
    words: Int32[Array, "R C"], bits: int, axis: int, order: tuple[int, ...] | None = None
) -> Int32[Array, "P Q"]:
    """The unsigned integers in words along an axis, the lowest bits first.

    Args:
        words: the words.
        bits: number of bits of each integer.
        axis: axis along which ``32 / bits`` integers were packed into a word.
        order: the place of each integer in its word; None for plain order.
    """
    count = 32 // bits
    places = jnp.asarray(order or range(count), jnp.int32) * bits
    values = (jnp.expand_dims(words, axis + 1) >> _along(places, axis + 1)) & (2**bits - 1)
    shape = list(words.shape)
    shape[axis] *= count
    return values.reshape(shape)


def _along(places: jax.Array, axis: int) -> jax.Array:
    shape = [1, 1, 1]
    shape[axis] = -1
    return places.reshape(shape)
