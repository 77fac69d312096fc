"""The sampler: one token for every sequence of a step, on the device."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Bool, Float32, Int, Int32, Key, UInt32

from rjax.sampling.params import SamplerMode
from rjax.sampling.processing import finite, process
from rjax.sampling.prompt_logprobs import token_logprobs
from rjax.sampling.state import FIELDS, SamplingState
from rjax.sampling.truncation import truncate

type Argmax = Callable[[Float32[Array, "B V"]], Int[Array, " B"]]


def first_largest(x: Float32[Array, "B V"]) -> Int[Array, " B"]:
    """The argmax over V; the first of equal numbers."""
    return jnp.argmax(x, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SampleResult:
    """The sampled tokens. Rows that were not live hold token -1 and undefined log-probabilities.

    ``logprob`` and ``rank`` are always present. If a jitted caller does not return them, the
    compiler removes their computation.

    Attributes:
        tokens: token ids.
        logprob: log-probability of the token.
        rank: 1 is the most likely token; 0 in a row that is not live.
        top_ids, top_logprobs: the A most likely tokens, best first.
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
    processed_logprobs: bool = False,
    bitmask: UInt32[Array, "B W"] | None = None,
    argmax: Argmax | None = None,
) -> tuple[SampleResult, SamplingState]:
    """Sample one token for each live row and count it in the state.

    A row's token depends only on its logits and its slot's state. It does not depend on the slot
    number, the other rows or the mode. The order of operations is that of vLLM: allow-list,
    ``min_tokens``, bias, penalties, temperature, min-p, top-k, top-p. The draw uses the Gumbel-max
    trick with a key folded from the sequence's seed and its number of generated tokens.

    Args:
        logits: raw logits; NaN counts as -inf.
        state: sampling state of all slots.
        slots: sampler slot of each row; live rows have distinct slots.
        live: rows to sample. The other rows are ignored and change no state.
        mode: static. "greedy" is the argmax of the raw logits, "random" adds temperature, "full"
            supports every parameter (``SamplingParams.sampler_mode``, ``step_mode``).
        num_logprobs: static; number of alternatives A per row, at most V.
        processed_logprobs: static; rows with ``SamplingState.processed_logprobs`` report the
            distribution that they sample from. All other rows, and all without it, report that of
            the raw logits.
        bitmask: tokens that each row may take in this step, as in ``SamplingState.allowed``; used
            only in mode "full".
        argmax: the argmax over V, for devices that share V; None if each has all of it.
    """
    num_slots = state.temperature.shape[0]
    rows = jax.tree.map(lambda field: field[jnp.where(live, slots, 0)], state)
    if bitmask is not None:
        rows = dataclasses.replace(rows, allowed=rows.allowed & bitmask)
    x = process(logits, rows) if mode == "full" else finite(logits)
    # XLA removes it where it is not used. It holds loops, which XLA would not merge.
    y = scaled(x, rows, truncated=mode == "full")
    if mode == "greedy":
        tokens = (argmax or first_largest)(x)
    else:
        keys = jax.vmap(step_key)(rows.key, rows.num_output)
        tokens = gumbel_argmax(x, y, keys, rows.temperature > 0, argmax)
    tokens = jnp.where(live, tokens.astype(jnp.int32), -1)

    reported = logits
    if processed_logprobs:
        # At temperature 1 ``x`` itself, for the bits of the raw ones where nothing is processed.
        heated = (rows.temperature > 0) & (rows.temperature != 1)
        processed = jnp.where((y == -jnp.inf) | heated[:, None], y, x)
        reported = jnp.where(rows.processed_logprobs[:, None] > 0, processed, logits)
    chances = token_logprobs(reported, tokens, num_logprobs)
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
    """Logits minus the row's maximum, divided by the temperature; truncated tokens are -inf.

    Rows sample from the softmax of these values. Greedy rows are scaled by temperature 1.
    """
    highest = jnp.max(x, axis=-1, keepdims=True)
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    # Avoid NaN in a row without an allowed token, which the request's checks exclude.
    x = jnp.where(x == -jnp.inf, -jnp.inf, (x - highest) / temperature)
    return truncate(x, rows.top_k, rows.top_p, rows.min_p) if truncated else x


def gumbel_argmax(
    x: Float32[Array, "B V"],
    y: Float32[Array, "B V"],
    keys: Key[Array, " B"],
    drawn: Bool[Array, " B"],
    argmax: Argmax | None = None,
) -> Int[Array, " B"]:
    """A draw from the softmax of ``y`` in drawn rows, the argmax of ``x`` in others.

    A draw is the argmax of ``y`` plus Gumbel noise. Hashes take most of its time, and one gives the
    noise of a pair of neighbouring tokens. The argmax is therefore over pairs, then in the best of
    them; a given ``argmax`` is over all tokens.
    """
    B, V = x.shape
    if argmax is not None:
        noise = jax.vmap(gumbel_noise, in_axes=(0, None))(keys, V)
        return argmax(jnp.where(drawn[:, None], y + noise, x))
    fill = ((0, 0), (0, V % 2))
    raw, scaled = (jnp.pad(z, fill, constant_values=-jnp.inf).reshape(B, -1, 2) for z in (x, y))

    def scores(raw: Array, scaled: Array, pairs: Int[Array, "B N"]) -> list[Array]:
        noise = jax.vmap(_pair_noise)(keys, pairs)
        return [jnp.where(drawn[:, None], scaled[..., i] + noise[i], raw[..., i]) for i in range(2)]

    first, second = scores(raw, scaled, jnp.broadcast_to(jnp.arange(raw.shape[1]), raw.shape[:2]))
    best = first_largest(jnp.maximum(first, second))[:, None]
    raw, scaled = (jnp.take_along_axis(z, best[..., None], axis=1) for z in (raw, scaled))
    first, second = scores(raw, scaled, best)
    return (2 * best + (second > first))[:, 0]


def gumbel_noise(key: Key[Array, ""], V: int) -> Float32[Array, " V"]:
    """Gumbel(0, 1) noise of V tokens."""
    pairs = _pair_noise(key, jnp.arange(-(-V // 2)))
    return jnp.stack(pairs, axis=1).reshape(-1)[:V]


def _pair_noise(
    key: Key[Array, ""], pairs: Int[Array, " N"]
) -> tuple[Float32[Array, " N"], Float32[Array, " N"]]:
    """Noise of the first and the second token of each pair, from one hash."""
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    counts = jnp.concatenate([jnp.zeros(pairs.shape, jnp.uint32), pairs.astype(jnp.uint32)])
    words = jnp.split(threefry_2x32((first, second), counts), 2)
    return gumbel_quantile(words[0]), gumbel_quantile(words[1])


def gumbel_quantile(words: UInt32[Array, " N"]) -> Float32[Array, " N"]:
    """Gumbel(0, 1) noise of random words.

    It ends at 22.9: tokens are drawn with their probabilities down to about 1e-9. The 23 bits of
    ``jax.random.gumbel`` distort those below 1e-6, and its mode "high" costs twice the hashes.
    """
    # The largest words round to 2**32, of which the noise would be -inf.
    uniform = jnp.minimum((words.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def step_key(key: UInt32[Array, "2"], position: Int32[Array, ""]) -> Key[Array, ""]:
    """The key of the draw of a sequence's next token."""
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
