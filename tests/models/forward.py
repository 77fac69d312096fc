"""One compiled forward pass; running op by op would compile every op by itself."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rjax import models


def jitted(model: models.Decoder):
    """A compiled function from tokens and positions to (hidden states, logits)."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, tokens, positions):
        model = nnx.merge(graph, state)
        hidden = model(tokens, positions, models.DenseAttention())
        return hidden, model.logits(hidden)

    return lambda tokens, positions: run(state, jnp.asarray(tokens), jnp.asarray(positions))


def logits_of(model: models.Decoder, tokens, positions=None) -> np.ndarray:
    """Logits of one sequence."""
    positions = jnp.arange(len(tokens)) if positions is None else positions
    return np.asarray(jitted(model)(tokens, positions)[1])
