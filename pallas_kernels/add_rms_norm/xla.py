"""Residual sum and RMSNorm in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.pallas_kernels.partial import Partial, reduced


def add_rms_norm(
    x: Float[Array, "T D"],
    update: Float[Array, "T D"] | Partial,
    weight: Float[Array, " D"],
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """(x + update, its RMSNorm), both in x's dtype; the norm of the rounded sum, in float32.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    x = x + reduced(update)
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return x, (y * weight.astype(jnp.float32)).astype(x.dtype)
