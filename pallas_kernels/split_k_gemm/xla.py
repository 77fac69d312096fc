"""Split-K GEMM in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.pallas_kernels.partial import Partial


def split_k_gemm(h: Float[Array, "T D"], w: Float[Array, "D E"], splits: int) -> Partial:
    """h @ w as ``splits`` summands; summand i is the product of the i-th split of the depth.

    ``splits`` divides the depth.
    """
    T, D = h.shape
    rows, weights = h.reshape(T, splits, -1), w.reshape(splits, D // splits, -1)
    summands = jnp.einsum("TXD,XDE->XTE", rows, weights, preferred_element_type=jnp.float32)
    return Partial(summands, dtype=h.dtype)
