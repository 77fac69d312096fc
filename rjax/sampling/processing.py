"""Logits processing before truncation: allow-list, ``min_tokens``, bias and penalties."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, UInt32

from rjax.sampling.state import SamplingState

_MAX = float(jnp.finfo(jnp.float32).max)


def finite(logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Clamp logits to float32's finite range; NaN becomes the lowest value.

    Only tokens that the request forbids are -inf afterwards, so that even a row of NaN gives an
    allowed token.
    """
    return jnp.clip(jnp.where(jnp.isnan(logits), -_MAX, logits), -_MAX, _MAX)


def process(logits: Float32[Array, "B V"], rows: SamplingState) -> Float32[Array, "B V"]:
    """Apply allow-list, ``min_tokens``, bias and the three penalties; forbidden tokens are -inf.

    The masks are applied last, which gives the same result as applying them first.

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
    # JAX wraps negative indexes; ``mode="drop"`` drops only indexes beyond the end of the axis.
    return jnp.where(ids < 0, V, ids)


def _unpacked(bitmask: UInt32[Array, "B W"], V: int) -> Bool[Array, "B V"]:
    bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(bitmask.shape[0], -1)[:, :V] != 0
