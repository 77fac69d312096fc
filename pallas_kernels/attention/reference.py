"""The reference: attention over pages in float32, each query row over its own page table."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.fp8 import Scales, scales_at


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
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Softmax attention of each row over its own pages; returns float32 (output, natural-log LSE).

    ``row_table[t]`` is the page table of row t's sequence, ``positions[t]`` its absolute position.
    A row at a negative position sees nothing: output 0 and LSE -inf. ``alibi_slopes[n]`` times (key
    position - query position) is added to head n's scores; ``sinks[n]`` is one more score of each
    row that sees anything, for a key whose value is 0. Pages times their scales (``fp8``) are the
    keys and values.
    """
    K, S = k_pages.shape[1:3]
    T, N, H = q.shape
    keys = jnp.arange(row_table.shape[1] * S)
    visible = keys <= positions[:, None]
    if spec.sliding_window is not None:
        visible &= keys > positions[:, None] - spec.sliding_window
    shape = (T, K, keys.size, H)
    live = visible[:, None, :, None]

    def gather(pages, scales):
        value = pages[row_table].astype(jnp.float32)
        if scales is not None:
            value *= scales_at(scales, row_table)[..., None, None]
        return jnp.where(live, value.swapaxes(1, 2).reshape(shape), 0)

    k, v = gather(k_pages, k_scales), gather(v_pages, v_scales)
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
