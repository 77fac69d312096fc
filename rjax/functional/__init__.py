"""Sampling as pure functions, for JAX programs that own their weights.

A program hands its weights in at each call, as a pytree, so a trainer can sample the very arrays it
trains, in its own process and inside its own ``jax.jit``, ``lax.while_loop`` or ``shard_map``. The
KV of a prompt is stored once for all its samples and read once per step for all of them.

    setup, weights = functional.prepare(model, max_context=1024)
    out = jax.jit(functools.partial(functional.rollout, setup, samples=64, max_new_tokens=256))(
        weights, prompts, lengths, keys, end_token=2)

or, step by step: ``make_state``, ``prefill``, ``fork``, ``decode``, ``sample``.
"""

from rjax.functional.extend import decode, prefill
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
]
