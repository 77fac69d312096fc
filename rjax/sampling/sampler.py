"""One token for every sequence of a step, on the device."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32, UInt32

from rjax.sampling.params import SamplerMode
from rjax.sampling.processing import finite, process
from rjax.sampling.prompt_logprobs import token_logprobs
from rjax.sampling.state import FIELDS, SamplingState
from rjax.sampling.truncation import truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SampleResult:
    """The sampled tokens; rows that were not live hold -1, and their log-probabilities nothing.

    ``logprob`` and ``rank`` are there for any number of alternatives; a jitted caller that does not
    return them does not pay for them.

    Attributes:
        tokens: token ids.
        logprob: of the token under the raw logits.
        rank: 1 is the likeliest token; 0 in a row that is not live.
        top_ids, top_logprobs: the A likeliest tokens under the raw logits, best first.
    """

    tokens: Int32[Array, " B"]
    logprob: Float32[Array, " B"]
    rank: Int32[Array, " B"]
    top_ids: Int32[Array, "B A"]
    top_logprobs: Float32[Array, "B A"]


def sample(
    logits: Float32[Array, "B V"],
    state: SamplingState,
    slots: Int[Array, " B"],
    live: Bool[Array, " B"],
    *,
    mode: SamplerMode,
    num_logprobs: int,
    words: UInt32[Array, "B W"] | None = None,
) -> tuple[SampleResult, SamplingState]:
    """Sample one token for each live row and count it in the state.

    A row's token depends on its logits and on its own slot's state alone: not on the slot, the
    other rows, their number or the mode (where several serve). The order of operations is that of
    vLLM: allow-list, ``min_tokens``, bias, penalties, temperature, min-p, top-k, top-p; then the
    Gumbel-max trick, with a key folded from the sequence's seed and its number of tokens so far.

    Args:
        logits: raw logits; NaN counts as the lowest.
        slots: row b is the sequence of slot ``slots[b]``; live rows have distinct slots.
        live: rows to sample for. The others may hold anything and change nothing.
        mode: static. "greedy" is the argmax of the raw logits, "random" knows temperatures besides,
            "full" everything (``SamplingParams.sampler_mode``, ``step_mode``).
        num_logprobs: static; alternatives (A) to report for each row, at most V.
        words: bits of the tokens that each row may take this once, as in ``SamplingState.allowed``;
            read in the mode "full" alone.
    """
    num_slots = state.temperature.shape[0]
    rows = jax.tree.map(lambda field: field[jnp.where(live, slots, 0)], state)
    if words is not None:
        rows = dataclasses.replace(rows, allowed=rows.allowed & words)
    if mode == "greedy":
        tokens = jnp.argmax(finite(logits), axis=-1)
    else:
        x = process(logits, rows) if mode == "full" else finite(logits)
        tokens = _drawn(x, rows, truncated=mode == "full")
    tokens = jnp.where(live, tokens.astype(jnp.int32), -1)

    chances = token_logprobs(logits, tokens, num_logprobs)
    fields = {name: getattr(state, name) for name in FIELDS}
    writes = jnp.where(live, slots, num_slots)  # beyond the axis: dropped
    fields["num_output"] = state.num_output.at[writes].add(1, mode="drop")
    if mode == "full":
        fields["output_counts"] = state.output_counts.at[writes, tokens].add(1, mode="drop")
    result = SampleResult(
        tokens=tokens,
        logprob=chances.logprob,
        rank=chances.rank,
        top_ids=chances.top_ids,
        top_logprobs=chances.top_logprobs,
    )
    return result, SamplingState(**fields)


def scaled(
    x: Float32[Array, "B V"], rows: SamplingState, *, truncated: bool
) -> Float32[Array, "B V"]:
    """Logits less the row's highest, over the temperature, with what is cut away at -inf.

    Their softmax is what a row samples from. Greedy rows are scaled as by temperature 1.
    """
    highest = jnp.max(x, axis=-1, keepdims=True)
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    # A row in which nothing is allowed (the request's check excludes it) must not become NaN.
    x = jnp.where(x == -jnp.inf, -jnp.inf, (x - highest) / temperature)
    return truncate(x, rows.top_k, rows.top_p, rows.min_p) if truncated else x


def _drawn(x: Float32[Array, "B V"], rows: SamplingState, *, truncated: bool) -> Int[Array, " B"]:
    """Greedy rows: the argmax of ``x``. The others: a draw from the softmax of the scaled ``x``."""
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(rows.key, rows.num_output, x.shape[-1])
    noisy = scaled(x, rows, truncated=truncated) + noise
    return jnp.argmax(jnp.where(rows.temperature[:, None] > 0, noisy, x), axis=-1)


def _noise(key: UInt32[Array, "2"], position: Int32[Array, ""], V: int) -> Float32[Array, " V"]:
    seeded = jax.random.wrap_key_data(key, impl="threefry2x32")
    # The default's 23 bits would misplace the chances of tokens below one in a million.
    return jax.random.gumbel(jax.random.fold_in(seeded, position), (V,), mode="high")
