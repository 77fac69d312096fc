"""Products in parts, in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def split_product(
    h: Float[Array, "T D"], w: Float[Array, "D E"], splits: int
) -> Float32[Array, "X T E"]:
    """``splits`` parts that sum to h @ w: part i over the i-th run of the depth.

    The depth is a multiple of ``splits``.
    """
    T, D = h.shape
    rows, weights = h.reshape(T, splits, -1), w.reshape(splits, D // splits, -1)
    return jnp.einsum("TXD,XDE->XTE", rows, weights, preferred_element_type=jnp.float32)


def sum_parts(
    product: Float[Array, "..."], like: Float[Array, "..."], rank: int
) -> Float[Array, "..."]:
    """A product of ``rank`` axes in like's dtype: itself, or the sum of its parts, rounded once."""
    return product if product.ndim == rank else product.sum(0).astype(like.dtype)
