"""Group sampling in one call: n samples of each prompt, a loop on the device."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, Key

from rjax.functional.extend import decode, prefill
from rjax.functional.sampling import sample
from rjax.functional.setup import Setup
from rjax.functional.state import fork, make_state, pages_needed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rollout:
    """The n samples of each of A prompts, with up to Z tokens each.

    Attributes:
        tokens: token ids; -1 beyond the end of a sample.
        logprobs: of each token under the raw logits; 0 beyond the end.
        lengths: tokens of each sample, the end token included.
    """

    tokens: Int32[Array | np.ndarray, "A n Z"]
    logprobs: Float32[Array | np.ndarray, "A n Z"]
    lengths: Int32[Array | np.ndarray, "A n"]


def rollout(
    setup: Setup,
    weights: Any,
    prompts: Int[Array, "A Q"],
    lengths: Int[Array, " A"],
    keys: Key[Array, " A"],
    *,
    samples: int,
    max_new_tokens: int,
    end_token: int | Sequence[int] | Int[Array, ""] | Int[Array, " E"] = -1,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Rollout:
    """Sample each prompt ``samples`` times; a prompt's KV is stored once and read once a step.

    Pure: call it inside ``jax.jit``, with ``setup`` and the keyword numbers ``samples``,
    ``max_new_tokens``, ``top_k``, ``top_p`` and ``min_p`` static. Under the caller's own
    ``shard_map`` over prompts each device samples its own; the tokens are those of one device,
    because a sample's random numbers depend on its prompt's key and its place in the group alone.

    Args:
        weights: pytree as ``prepare`` gives it; not copied.
        prompts: token ids, padded at the right with anything.
        lengths: tokens of each prompt, 1 to Q.
        keys: one for each prompt.
        samples: n.
        max_new_tokens: Z; the loop ends earlier when all samples have.
        end_token: ends a sample; several end it too, as a list or an array. -1 is none, so that
            an array may be padded with it.
        temperature, top_k, top_p, min_p: as in ``sample``.

    Raises:
        ValueError: prompt and output together can exceed ``setup.max_context``.
    """
    A, Q = prompts.shape
    Z, B = max_new_tokens, A * samples
    if setup.max_context < Q + Z - 1 or min(samples, Z) < 1:
        raise ValueError(
            f"{samples} samples of up to {Q} prompt tokens and {Z} new ones; samples and new "
            f"tokens must be at least 1, and max_context ({setup.max_context}) must hold both"
        )
    ends = jnp.atleast_1d(jnp.asarray(end_token, jnp.int32))
    pages = pages_needed(setup, prompts=A, prompt_tokens=Q, samples=samples, new_tokens=Z)
    dtype = jnp.result_type(*jax.tree.leaves(weights))
    state = make_state(setup, batch=A, num_pages=pages, dtype=dtype)
    state, logits = prefill(setup, weights, state, prompts, lengths)
    parents = jnp.repeat(jnp.arange(A), samples)
    state = fork(setup, state, parents)
    row_keys = jax.vmap(jax.random.fold_in)(keys[parents], jnp.tile(jnp.arange(samples), A))

    def draw(i: Int[Array, ""], logits: Float32[Array, "B V"], tokens, logprobs, done):
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, i)
        found = sample(
            logits, step_keys, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )
        token = jnp.where(done, -1, found.tokens)
        tokens = tokens.at[:, i].set(token)
        logprobs = logprobs.at[:, i].set(jnp.where(done, 0.0, found.logprobs))
        return token, tokens, logprobs, done | jnp.isin(token, ends)

    def unfinished(carry) -> Bool[Array, ""]:
        i, *_, done = carry
        return (i < Z) & ~jnp.all(done)

    def step(carry):
        i, state, token, tokens, logprobs, done = carry
        state, logits = decode(setup, weights, state, token, ~done)
        return i + 1, state, *draw(i, logits, tokens, logprobs, done)

    blank = jnp.full((B, Z), -1, jnp.int32), jnp.zeros((B, Z), jnp.float32), jnp.zeros(B, bool)
    first = draw(jnp.zeros((), jnp.int32), logits[parents], *blank)
    carry = jax.lax.while_loop(unfinished, step, (jnp.ones((), jnp.int32), state, *first))
    tokens, logprobs = (x.reshape(A, samples, Z) for x in carry[3:5])
    return Rollout(tokens, logprobs, jnp.sum(tokens >= 0, axis=-1, dtype=jnp.int32))
