"""Sampling as pure functions, for JAX programs that own their weights.

A program hands its weights in at each call, as a pytree, so a trainer can sample the very arrays it
trains, in its own process and inside its own ``jax.jit``, ``lax.while_loop`` or ``shard_map``. The
KV of a prompt is stored once for all its samples and read once per step for all of them.

A model comes from a checkpoint: ``load_model(folder).model``, with ``folder`` from
``resolve_folder("Qwen/Qwen3-0.6B")`` for one of the hub. Or it is made, here with random weights:

    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from models import BUNDLED_MODEL, config_from_folder, init_model
    >>> from rjax import functional
    >>> model = init_model(config_from_folder(BUNDLED_MODEL), dtype=jnp.float32, seed=0)
    >>> setup, weights = functional.prepare(model, max_context=32, page_size=8)

Four samples of each of two prompts, the second one token shorter and padded. Either of two tokens
ends a sample:

    >>> prompts = jnp.array([[5, 6, 7, 8], [9, 10, 11, 0]])
    >>> lengths = jnp.array([4, 3])
    >>> rollout = functools.partial(
    ...     functional.rollout, setup, samples=4, max_new_tokens=6, end_token=[1, 2]
    ... )
    >>> out = jax.jit(rollout)(weights, prompts, lengths, jax.random.split(jax.random.key(0), 2))
    >>> out.tokens.shape
    (2, 4, 6)

A step of training on the samples of the first prompt: the gradient of their log-likelihood, by
``token_logprobs``, which reads no pages. Places beyond the end hold -1 and count nothing:

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

The next ``rollout`` takes the new weights; nothing is compiled anew. Step by step the same is
``make_state``, ``prefill``, ``fork``, ``decode``, ``sample``.
"""

from rjax.functional.extend import decode, prefill
from rjax.functional.logprobs import token_logprobs
from rjax.functional.rollout import Rollout, rollout
from rjax.functional.sampling import Sampled, sample
from rjax.functional.setup import Setup, prepare
from rjax.functional.state import DecodeState, fork, make_state, pages_needed

__all__ = [
    "DecodeState",
    "Rollout",
    "Sampled",
    "Setup",
    "decode",
    "fork",
    "make_state",
    "pages_needed",
    "prefill",
    "prepare",
    "rollout",
    "sample",
    "token_logprobs",
]
