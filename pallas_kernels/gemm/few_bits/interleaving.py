"""The order of values of 4 or 8 bits in which the GEMMs on Hopper widen them to 16 bits.

A thread loads eight values of 4 bits at once and wants pairs of neighbours in four places of
wgmma's left operand. Interleaved values lie so that it loads what it needs: an 8 x 4 x 2 block of
inputs in the order (thread, second of a pair, pair). A shift and a mask then give a pair. With
8-bit values, it loads four and wants two pairs: a 2 x 4 x 2 block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num

INTERLEAVED = 32
"""Inputs of int4 that are reordered among themselves."""

INTERLEAVED_BYTES = 16
"""Inputs of 8 bits that are reordered among themselves."""

PAIRS = 4
"""Pairs of a 32-bit word of int4."""

PAIRS_OF_BYTES = 2
"""Pairs of a 32-bit word of 8-bit values."""


def interleave(values: Num[Array, "... E"]) -> Num[Array, "... E"]:
    """Values in the order that the kernel expects; E is a multiple of 32, or 16 for 8 bits."""
    # Input 8 * pair + 2 * thread + second of 32 goes to 8 * thread + 4 * second + pair.
    return _reordered(values, (_pairs(values), 4, 2), (1, 2, 0))


def natural(values: Num[Array, "... E"]) -> Num[Array, "... E"]:
    """The inverse of ``interleave``."""
    return _reordered(values, (4, 2, _pairs(values)), (2, 0, 1))


def _pairs(values: Array) -> int:
    return PAIRS if values.dtype == jnp.int4 else PAIRS_OF_BYTES


def _reordered(values: Array, block: tuple[int, int, int], order: tuple[int, int, int]) -> Array:
    blocks = values.reshape(*values.shape[:-1], -1, *block)
    first = blocks.ndim - 3
    # XLA transposes bytes, not half bytes, on every platform.
    blocks = blocks.astype(jnp.int8) if values.dtype == jnp.int4 else blocks
    moved = blocks.transpose(*range(first), *(first + axis for axis in order))
    return moved.reshape(values.shape).astype(values.dtype)
