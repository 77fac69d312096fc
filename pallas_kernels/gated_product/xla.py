"""The gated product in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.gated_activation.xla import gated_silu


def gated_product(h: Float[Array, "T D"], w: Float[Array, "D 2 F"]) -> Float[Array, "T F"]:
    """silu(h @ w[:, 0]) * (h @ w[:, 1]) in h's dtype (SwiGLU; Shazeer, 2020)."""
    return gated_silu(jnp.einsum("TD,DAF->TAF", h, w))
