"""Attention over pages in float32, one query row at a time in meaning: the oracle of the tests."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.spec import AttentionSpec


def paged_attention_reference(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    row_table: Int[Array, "T M"],
    positions: Int[Array, " T"],
    spec: AttentionSpec,
    *,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Softmax attention of each row over its own pages; returns float32 (output, natural-log LSE).

    ``row_table[t]`` is the page table of row t's sequence, ``positions[t]`` its absolute position.
    A row at a negative position sees nothing: output 0 and LSE -inf. ``alibi_slopes[n]`` times (key
    position - query position) is added to head n's scores; ``sinks[n]`` is one more score of each
    row that sees anything, for a key whose value is 0.
    """
    K, S = k_pages.shape[1:3]
    T, N, H = q.shape
    keys = jnp.arange(row_table.shape[1] * S)
    visible = keys <= positions[:, None]
    if spec.sliding_window is not None:
        visible &= keys > positions[:, None] - spec.sliding_window
    shape = (T, K, keys.size, H)
    live = visible[:, None, :, None]
    k = jnp.where(live, k_pages[row_table].swapaxes(1, 2).reshape(shape).astype(jnp.float32), 0)
    v = jnp.where(live, v_pages[row_table].swapaxes(1, 2).reshape(shape).astype(jnp.float32), 0)
    q32 = q.astype(jnp.float32).reshape(T, K, N // K, H)
    scores = jnp.einsum("TKGH,TKCH->TKGC", q32, k, precision="highest") * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if alibi_slopes is not None:
        distance = (keys - positions[:, None]).astype(jnp.float32)
        scores += alibi_slopes.reshape(K, N // K, 1) * distance[:, None, None]
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(K, N // K, 1), (T, K, N // K, 1))
        sink = jnp.where(visible.any(1)[:, None, None, None], sink, -jnp.inf)
        scores = jnp.concatenate([scores, sink], -1)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    out = jnp.einsum("TKGC,TKCH->TKGH", weights[..., : keys.size], v, precision="highest")
    return out.reshape(T, N, H), lse.reshape(T, N)
