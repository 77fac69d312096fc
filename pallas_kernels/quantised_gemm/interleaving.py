"""The order of int4 values in which the GEMM on Hopper reads them.

A thread loads eight int4 at once and wants pairs of neighbours in four places of wgmma's left
operand. Interleaved values lie so that it loads what it needs: an 8 x 4 x 2 block of inputs in the
order (thread, second of a pair, pair). A shift and a mask then give a pair.
"""

import jax.numpy as jnp
from jaxtyping import Array, Num

INTERLEAVED = 32
"""Inputs that are reordered among themselves."""

PAIRS = 4
"""Pairs of a 32-bit word."""


def interleave(values: Num[Array, "... E"]) -> Num[Array, "... E"]:
    """Values in the order that the kernel expects; E is a multiple of 32."""
    # Input 8 * pair + 2 * thread + second of 32 goes to 8 * thread + 4 * second + pair.
    return _reordered(values, (PAIRS, 4, 2), (1, 2, 0))


def natural(values: Num[Array, "... E"]) -> Num[Array, "... E"]:
    """The inverse of ``interleave``."""
    return _reordered(values, (4, 2, PAIRS), (2, 0, 1))


def _reordered(values: Array, block: tuple[int, int, int], order: tuple[int, int, int]) -> Array:
    blocks = values.reshape(*values.shape[:-1], -1, *block)
    first = blocks.ndim - 3
    # XLA transposes bytes, not half bytes, on every platform.
    blocks = blocks.astype(jnp.int8) if values.dtype == jnp.int4 else blocks
    moved = blocks.transpose(*range(first), *(first + axis for axis in order))
    return moved.reshape(values.shape).astype(values.dtype)
