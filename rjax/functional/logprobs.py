"""Log-probabilities of whole sequences in one differentiable forward pass."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32, Int

from rjax.functional.setup import Setup
from rjax.models import DenseAttention


def token_logprobs(
    setup: Setup, weights: Any, tokens: Int[Array, "B Q"]
) -> Float32[Array, "B Q-1"]:
    """Log-probability of each token of each row, given the tokens before it; the first has none.

    The log-probabilities are those of the raw logits, as in `rollout`. The function is pure and
    differentiable with respect to ``weights``. It uses dense causal attention without pages. Add
    ``jax.checkpoint`` to recompute activations. Peak memory is that of B x Q x V float32 logits.

    Args:
        setup: the model's static part, from ``prepare``.
        weights: pytree as ``prepare`` gives it.
        tokens: token ids, right-padded with any id of the vocabulary. Mask the results at padded
            positions.
    """

    def one(row: Int[Array, " Q"]) -> Float32[Array, " Q-1"]:
        model = nnx.merge(setup.graph, weights)
        hidden = model(row, jnp.arange(row.shape[0]), DenseAttention())
        found = jax.nn.log_softmax(model.logits(hidden[:-1]).astype(jnp.float32))
        return jnp.take_along_axis(found, row[1:, None], axis=-1)[:, 0]

    return jax.vmap(one)(tokens)
