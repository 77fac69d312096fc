"""Log-probabilities of whole sequences in one forward pass that can be differentiated."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int

from models import DenseAttention
from rjax.functional.setup import Setup


def token_logprobs(
    setup: Setup, weights: Any, tokens: Int[Array, "B Q"]
) -> Float32[Array, "B Q-1"]:
    """Log-probability of each token but the first of each row, given those before it.

    Under the raw logits, as `rollout` reports its samples'. Pure and differentiable with respect
    to ``weights``: dense causal attention, without pages, and recomputation of a layer is the
    caller's to add (``jax.checkpoint``). Memory is that of B x Q x V logits.

    Args:
        setup: of the model.
        weights: pytree as ``prepare`` gives it.
        tokens: token ids, padded at the right with any id of the vocabulary, since a later token
            changes nothing before it. Mask what follows a padded place.
    """

    def one(row: Int[Array, " Q"]) -> Float32[Array, " Q-1"]:
        model = nnx.merge(setup.graph, weights)
        hidden = model(row, jnp.arange(row.shape[0]), DenseAttention())
        found = jax.nn.log_softmax(model.logits(hidden[:-1]).astype(jnp.float32))
        return jnp.take_along_axis(found, row[1:, None], axis=-1)[:, 0]

    return jax.vmap(one)(tokens)
