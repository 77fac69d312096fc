"""Products of few rows in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def product(
    h: Float[Array, "T D"],
    w: Float[Array, "D E"],
    squares: Float32[Array, "T P"] | None = None,
    eps: float = 0.0,
) -> Float[Array, "T E"]:
    """h @ w in h's dtype, summed in float32.

    With ``squares``, partial sums over a row's D numbers before their norm's weight, each row is
    divided by the root of their mean plus ``eps``: the RMSNorm of a row that has only met its
    weight so far.
    """
    return (_matmul(h, w) * row_scale(squares, eps, h.shape[1])).astype(h.dtype)


def gated_product(
    h: Float[Array, "T D"],
    w: Float[Array, "D 2 F"],
    squares: Float32[Array, "T P"] | None = None,
    eps: float = 0.0,
) -> Float[Array, "T F"]:
    """silu(gate) * up of the products with w[:, 0] and w[:, 1], rows divided as in ``product``."""
    scale = row_scale(squares, eps, h.shape[1])
    gate, up = (_matmul(h, w[:, part]) * scale for part in range(2))
    return (jax.nn.silu(gate) * up).astype(h.dtype)


def add_product(
    x: Float[Array, "T D"],
    h: Float[Array, "T F"],
    w: Float[Array, "F D"],
    norm_weight: Float[Array, " D"],
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float32[Array, "T P"]]:
    """(x + h @ w, that times the norm's weight, partial sums of its squares), the first two in
    x's dtype, the others of the rounded sum; P is 1 here."""
    total = (x.astype(jnp.float32) + _matmul(h, w)).astype(x.dtype)
    y = total.astype(jnp.float32)
    scaled = (y * norm_weight.astype(jnp.float32)).astype(x.dtype)
    return total, scaled, jnp.square(y).sum(axis=1, keepdims=True)


def row_scale(
    squares: Float32[Array, "T P"] | None, eps: float, D: int
) -> Float32[Array, "T 1"] | float:
    """What rows of D numbers are still to be multiplied with; 1 without ``squares``."""
    if squares is None:
        return 1.0
    return jax.lax.rsqrt(squares.sum(axis=1, keepdims=True) / D + eps)


def _matmul(h, w):
    return jnp.matmul(h, w, preferred_element_type=jnp.float32)
