"""The arrays of scales and zero points, from those of a checkpoint."""

import jax
import jax.numpy as jnp

from rjax.models.formats.weight_format import Target
from rjax.models.schemes import Scaled


def block_leaves(
    scale: jax.Array, zero_point: jax.Array | None, target: Target
) -> dict[str, jax.Array]:
    """``weight_scale`` and, where they are given, ``weight_zero_point``.

    Args:
        scale: (outputs, inputs), one for each block of the scheme, ragged at the edges. Where the
            scheme has one for each channel: one for each output, or one in all.
        zero_point: signed values of the same shape as ``scale``.
        target: what to decode to, with a `Scaled` scheme.
    """
    scheme = target.scheme
    assert isinstance(scheme, Scaled)
    found = {"weight_scale": scale.astype(scheme.scale_dtype)}
    if zero_point is not None:
        found["weight_zero_point"] = zero_point.astype(jnp.int8)
    rows, columns = scheme.block
    if columns is None:
        outputs = target.shape[:1]
        return {name: jnp.broadcast_to(leaf.reshape(-1), outputs) for name, leaf in found.items()}
    return {
        name: _regroup(leaf, (rows, columns), target.blocks[name], target.shape)
        for name, leaf in found.items()
    }


def _regroup(
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
