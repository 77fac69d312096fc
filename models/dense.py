"""Plain attention over one whole sequence, without a cache: for tests and training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rjax.models.operations import HeadOptions, HeadsOperations
from rjax.models.rope import Rotary
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.rope_and_cache.base import rotate


class DenseAttention(HeadsOperations):
    """The T tokens of a call are one sequence in order; token i sees the tokens up to i.

    It is stateless, so it can be shared, traced and mapped with ``jax.vmap`` over sequences.
    """

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Causal attention, with the window and soft cap of the spec; the softmax is float32."""
        return self.attend_with_options(layer, q, k, v, rotary, spec, HeadOptions())

    def attend_with_options(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
        heads: HeadOptions,
    ) -> Float[Array, "T N H"]:
        """Causal attention as in ``attend``, with sinks and ALiBi."""
        del layer
        if rotary is not None:
            q = rotate(q, rotary.cos, rotary.sin)
            k = rotate(k, rotary.cos, rotary.sin)
        T, N, H = q.shape
        K = k.shape[1]
        grouped = q.reshape(T, K, N // K, H)
        scores = jnp.einsum("TKGH,SKH->KGTS", grouped, k, preferred_element_type=jnp.float32)
        scores *= spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
        if heads.alibi_slopes is not None:
            offsets = (jnp.arange(T) - jnp.arange(T)[:, None]).astype(jnp.float32)
            scores += heads.alibi_slopes.reshape(K, N // K, 1, 1) * offsets
        distance = jnp.arange(T)[:, None] - jnp.arange(T)
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible &= distance < spec.sliding_window
        scores = jnp.where(visible, scores, -jnp.inf)
        if heads.sinks is not None:
            sink = heads.sinks.reshape(K, N // K, 1, 1)
            sink = jnp.broadcast_to(sink, (*scores.shape[:3], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :T]
        out = jnp.einsum(
            "KGTS,SKH->TKGH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return out.astype(q.dtype).reshape(T, N, H)
