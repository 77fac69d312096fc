"""Sampling as pure functions, for JAX programs that own their weights.

A program passes its weights to each call as a pytree. A trainer can therefore sample from the
arrays that it trains, in its own process and inside its own ``jax.jit``, ``lax.while_loop`` or
``shard_map``. The KV of a prompt is stored once for all its samples and read once per step.

Load a model from a checkpoint with ``load_model(folder).model``, where ``folder`` is a local folder
or ``resolve_folder("Qwen/Qwen3-0.6B")``. This example uses random weights:

    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from rjax.models import BUNDLED_MODEL, config_from_folder, init_model
    >>> from rjax import functional
    >>> model = init_model(config_from_folder(BUNDLED_MODEL), dtype=jnp.float32, seed=0)
    >>> setup, weights = functional.prepare(model, max_context=32, page_size=8)

Draw four samples of each of two prompts. The second prompt is one token shorter and padded. Either
of two tokens ends a sample:

    >>> prompts = jnp.array([[5, 6, 7, 8], [9, 10, 11, 0]])
    >>> lengths = jnp.array([4, 3])
    >>> rollout = functools.partial(
    ...     functional.rollout, setup, samples=4, max_new_tokens=6, end_token=[1, 2]
    ... )
    >>> out = jax.jit(rollout)(weights, prompts, lengths, jax.random.split(jax.random.key(0), 2))
    >>> out.tokens.shape
    (2, 4, 6)

Train one step on the samples of the first prompt with the gradient of their log-likelihood.
``token_logprobs`` uses no KV pages. Positions after the end hold -1 and are masked:

    >>> samples = out.tokens[0]
    >>> whole = jnp.concatenate([jnp.tile(prompts[0], (4, 1)), jnp.maximum(samples, 0)], axis=1)
    >>> def log_likelihood(weights):
    ...     found = functional.token_logprobs(setup, weights, whole)[:, 3:]
    ...     return jnp.sum(jnp.where(samples >= 0, found, 0.0))
    >>> value, gradient = jax.jit(jax.value_and_grad(log_likelihood))(weights)
    >>> bool(jnp.allclose(value, out.logprobs[0].sum(), atol=1e-2))
    True
    >>> weights = jax.tree.map(lambda w, g: w + 1e-4 * g, weights, gradient)
    >>> bool(log_likelihood(weights) > value)
    True

The next ``rollout`` takes the new weights without recompilation. To run the steps of a rollout
one by one, use ``make_state``, ``prefill``, ``fork``, ``decode`` and ``sample``.
"""

from rjax.functional.extend import decode, prefill
from rjax.functional.logprobs import token_logprobs
from rjax.functional.rollout import Rollout, rollout
from rjax.functional.sampling import Sampled, sample
from rjax.functional.setup import Setup, prepare
from rjax.functional.state import DecodeState, fork, make_state, pages_needed
from rjax.functional.trainer_weights import fuse_weights

__all__ = [
    "DecodeState",
    "Rollout",
    "Sampled",
    "Setup",
    "decode",
    "fork",
    "fuse_weights",
    "make_state",
    "pages_needed",
    "prefill",
    "prepare",
    "rollout",
    "sample",
    "token_logprobs",
]
