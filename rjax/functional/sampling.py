"""One token for each row of logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key

from rjax.sampling.processing import finite
from rjax.sampling.truncation import truncate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A token for each row.

    Attributes:
        tokens: token ids.
        logprobs: of the tokens under the raw logits: the model's own, before temperature and
            truncation.
    """

    tokens: Int32[Array, " B"]
    logprobs: Float32[Array, " B"]


def sample(
    logits: Float32[Array, "B V"],
    keys: Key[Array, " B"],
    *,
    temperature: float | Float[Array, ""] | Float[Array, " B"] = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampled:
    """Draw a token from each row, by the Gumbel-max trick; temperature 0 takes the likeliest.

    Args:
        logits: raw logits; NaN counts as the lowest.
        keys: one for each row, so that a row's token depends on no other row.
        temperature: 0 or more; one for all rows or one for each.
        top_k: keep so many of the likeliest tokens; 0 keeps all.
        top_p: keep the fewest tokens whose probabilities reach this; 1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
    """
    B, V = logits.shape
    x = finite(logits)
    heat = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (B,))[:, None]
    scaled = (x - jnp.max(x, axis=-1, keepdims=True)) / jnp.where(heat > 0, heat, 1.0)
    if top_k > 0 or top_p < 1 or min_p > 0:
        scaled = truncate(
            scaled,
            jnp.full(B, top_k, jnp.int32),
            jnp.full(B, top_p, jnp.float32),
            jnp.full(B, min_p, jnp.float32),
        )
    # The default's 23 bits would misplace the chances of tokens below one in a million.
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (V,), mode="high"))(keys)
    tokens = jnp.argmax(jnp.where(heat > 0, scaled + noise, x), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=-1)[:, 0]
    return Sampled(tokens, chosen)
