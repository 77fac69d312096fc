"""Relay fusion by its definition: merge partial softmax results of one row."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def relay_fusion_reference(
    outs: Float[Array, "E T N H"], lses: Float[Array, "E T N"]
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Merge E partial results a row (Zhu et al., ACL 2024, eq. for relay fusion, for any E).

    An empty segment has LSE -inf and its output is ignored; if all are empty: 0 and -inf.
    """
    lse = jax.nn.logsumexp(lses.astype(jnp.float32), axis=0)
    weights = jnp.exp(lses - jnp.where(jnp.isneginf(lse), 0, lse))
    terms = jnp.where(jnp.isneginf(lses)[..., None], 0, weights[..., None] * outs)
    return terms.sum(0), lse
