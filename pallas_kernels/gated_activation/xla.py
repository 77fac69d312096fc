"""Gated activation in plain JAX."""

import jax
from jaxtyping import Array, Float


def gated_silu(h: Float[Array, "T 2 F"], upcoming: Array | None = None) -> Float[Array, "T F"]:
    """silu(h[:, 0]) * h[:, 1], in h's dtype (SwiGLU; Shazeer, 2020).

    ``upcoming`` is for backends that can fetch ahead; here XLA drops it.
    """
    del upcoming
    return jax.nn.silu(h[:, 0]) * h[:, 1]
