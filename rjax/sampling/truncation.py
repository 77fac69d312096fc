"""min-p, top-k and top-p without a sort: each keeps the tokens at or above a threshold.

Tokens with equal logits are kept or dropped together, and all sums are of integers. The result is
therefore independent of summation order and of the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

_TOTAL = 2.0**31


def truncate(
    x: Float32[Array, "B V"],
    top_k: Int32[Array, " B"],
    top_p: Float32[Array, " B"],
    min_p: Float32[Array, " B"],
) -> Float32[Array, "B V"]:
    """Apply min-p, then top-k, then top-p; dropped tokens become -inf.

    Args:
        x: logits after temperature, minus the row's maximum.
        top_k: 0 or less keeps all.
        top_p: 1 or more keeps all; probabilities are normalised over the tokens kept by top-k.
        min_p: 0 keeps all.
    """
    V = x.shape[-1]
    x = jnp.where(x >= jnp.log(min_p)[:, None], x, -jnp.inf)

    keys = _ordered(x)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, V), V).astype(jnp.uint32)
    x = jnp.where(keys >= _threshold(keys, jnp.ones_like(keys), k)[:, None], x, -jnp.inf)

    weights = _weights(x)
    total = jnp.sum(weights, axis=-1, dtype=jnp.uint32)
    target = jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.uint32)
    target = jnp.clip(target, 1, total)
    nucleus = keys >= _threshold(keys, weights, target)[:, None]
    return jnp.where(nucleus | (top_p >= 1)[:, None], x, -jnp.inf)


def _ordered(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Map floats to unsigned integers of the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 is 0
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _weights(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Probabilities as integers that sum to about 2**31 and always to less than 2**32."""
    p, V = jnp.exp(x), x.shape[-1]
    scale = jnp.full((x.shape[0], 1), _TOTAL / V, jnp.float32)  # no p is above 1
    for _ in range(2):  # the first pass gives a sum above 2**31 / V, the second close to 2**31
        rounded = jnp.sum(_rounded(p * scale), axis=-1, keepdims=True, dtype=jnp.uint32)
        # rounding lowers the sum by at most V / 2
        scale = scale * (_TOTAL / (rounded.astype(jnp.float32) + V / 2))
    return _rounded(p * scale)


def _rounded(x: Float32[Array, "B V"]) -> UInt32[Array, "B V"]:
    return jnp.round(x).astype(jnp.uint32)


def _threshold(
    keys: UInt32[Array, "B V"], weights: UInt32[Array, "B V"], target: UInt32[Array, " B"]
) -> UInt32[Array, " B"]:
    """Binary search for the highest key at or above which the weights sum to ``target``."""

    def set_bit(step: Int32[Array, ""], found: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        tried = found | (jnp.uint32(1 << 31) >> step.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= tried[:, None], weights, 0), axis=-1, dtype=jnp.uint32)
        return jnp.where(reached >= target, tried, found)

    return jax.lax.fori_loop(0, 32, set_bit, jnp.zeros_like(target))
