"""What happens to a row of logits, token by token, before tokens are cut away."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt32

from rjax.sampling.state import SamplingState

_MAX = float(jnp.finfo(jnp.float32).max)


def finite(logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Logits brought into float32's finite range; NaN becomes the lowest.

    A token that the model gave no chance stays different from one that the request forbids (-inf),
    so that even a row of NaN yields a token that is allowed.
    """
    return jnp.clip(jnp.where(jnp.isnan(logits), -_MAX, logits), -_MAX, _MAX)


def process(logits: Float32[Array, "B V"], rows: SamplingState) -> Float32[Array, "B V"]:
    """Logits after the allow-list, ``min_tokens``, bias and the three penalties; forbidden is -inf.

    The masks are laid on last: -inf survives every other operation, so the order does not show.

    Args:
        logits: raw logits, float32.
        rows: the state's rows of these sequences, in the same order.
    """
    B, V = logits.shape
    row = jnp.arange(B)[:, None]
    x = finite(logits)
    x = x.at[row, _outside(rows.bias_ids, V)].add(rows.bias_values, mode="drop")

    counts = rows.output_counts.astype(jnp.float32)
    seen = (counts > 0) | _unpacked(rows.in_prompt, V)
    repetition = rows.repetition_penalty[:, None]
    x = jnp.where(seen, jnp.where(x > 0, x / repetition, x * repetition), x)
    x = x - rows.frequency_penalty[:, None] * counts
    x = x - rows.presence_penalty[:, None] * (counts > 0)

    early = (rows.num_output < rows.min_tokens)[:, None]
    allowed = _unpacked(rows.allowed, V)
    held_back = jnp.where(early, _outside(rows.suppressed, V), V)
    allowed = allowed.at[row, held_back].set(False, mode="drop")
    return jnp.where(allowed, finite(x), -jnp.inf)


def _outside(ids: Array, V: int) -> Array:
    # jax counts negative indexes from the end; padding has to lie beyond the axis to be dropped.
    return jnp.where(ids < 0, V, ids)


def _unpacked(words: UInt32[Array, "B W"], V: int) -> Bool[Array, "B V"]:
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :V] != 0
