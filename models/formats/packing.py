"""Small integers in 32-bit words, and scales of blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def unpack(
    words: Int32[Array, "R C"], bits: int, axis: int, order: tuple[int, ...] | None = None
) -> Int32[Array, "P Q"]:
    """The unsigned integers in words along an axis, the lowest bits first.

    Args:
        words: the words.
        bits: of each integer.
        axis: along which ``32 / bits`` integers were packed into a word.
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


def scale_leaf(
    values: jax.Array, group: int | None, block: tuple[int, int], shape: tuple[int, int]
) -> jax.Array:
    """The array of scales or zero points from those of groups of inputs.

    Args:
        values: (outputs, groups).
        group: inputs of a group; None for all, and (outputs,) as the result.
        block, shape: as ``want`` and ``shape`` of `regroup`.
    """
    return values[:, 0] if group is None else regroup(values, (1, group), block, shape)


def regroup(
    values: jax.Array, have: tuple[int, int], want: tuple[int, int], shape: tuple[int, int]
) -> jax.Array:
    """Values of blocks as values of the smaller blocks that they consist of.

    Args:
        values: one for each block of ``have``, ragged at the edges.
        have: (outputs, inputs) of a block.
        want: the same of the result; it divides ``have`` and ``shape``.
        shape: (outputs, inputs) of the weight.
    """
    for axis, (one, other, size) in enumerate(zip(have, want, shape, strict=True)):
        assert one % other == 0 and size % other == 0, (have, want, shape)
        values = jnp.repeat(values, one // other, axis)
        values = jax.lax.slice_in_dim(values, 0, size // other, axis=axis)
    return values
