"""Sample one token from each row of logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key

from rjax.sampling.processing import finite
from rjax.sampling.sampler import gumbel_argmax
from rjax.sampling.truncation import truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token per row.

    Attributes:
        tokens: token ids.
        logprobs: log-probability of each token under the raw logits, before temperature and
            truncation.
        processed_logprobs: log-probability of each token under the distribution that it was drawn
            from, after temperature and truncation. Rows with temperature 0 count as temperature 1.
    """

    tokens: Int32[Array, " B"]
    logprobs: Float32[Array, " B"]
    processed_logprobs: Float32[Array, " B"]


def sample(
    logits: Float32[Array, "B V"],
    keys: Key[Array, " B"],
    *,
    temperature: float | Float[Array, ""] | Float[Array, " B"] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampled:
    """Draw a token from each row, by the Gumbel-max trick; temperature 0 takes the most likely.

    Args:
        logits: raw logits; NaN counts as -inf.
        keys: one per row, so that a row's token does not depend on other rows.
        temperature: 0 or more; a scalar or one per row.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with this much probability; 1 keeps all.
        min_p: keep tokens with at least this fraction of the highest probability; 0 keeps all.
    """
    B = logits.shape[0]
    x = finite(logits)
    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B,))[:, None]
    shifted = x - jnp.max(x, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(heat > 0, heat, 1.0)
    if top_k > 0 or top_p < 1 or min_p > 0:
        scaled = truncate(
            scaled,
            jnp.full(B, top_k, jnp.int32),
            jnp.full(B, top_p, jnp.float32),
            jnp.full(B, min_p, jnp.float32),
        )
    tokens = gumbel_argmax(x, scaled, keys, heat[:, 0] > 0).astype(jnp.int32)
    return Sampled(tokens, _logprobs(shifted, tokens), _logprobs(scaled, tokens))


def _logprobs(y: Float32[Array, "B V"], tokens: Int32[Array, " B"]) -> Float32[Array, " B"]:
    """Log-probabilities under the softmax of rows whose largest value is 0."""
    chosen = jnp.take_along_axis(y, tokens[:, None], axis=-1)[:, 0]
    return chosen - jnp.log(jnp.sum(jnp.exp(y), axis=-1))
