"""Gated activation in plain JAX."""

import jax
from jaxtyping import Array, Float


def silu_and_mul(h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """silu(h[:, 0]) * h[:, 1], in h's dtype (SwiGLU; Shazeer, 2020)."""
    return jax.nn.silu(h[:, 0]) * h[:, 1]
