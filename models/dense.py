"""Plain attention over one whole sequence, without a cache: for tests and training."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from rjax.models.operations import HeadOptions, HeadsOperations
from rjax.models.rope import Rotary
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.gated_delta.base import causal_conv, gated_delta, split_mixed
from rjax.pallas_kernels.gated_delta.states import one_sequence
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

    def gated_delta(
        self,
        layer: int,
        mixed: Float[Array, "T K W"],
        weight: Float[Array, "K X W"],
        decay: Float32[Array, "T K G"],
        beta: Float32[Array, "T K G"],
        key_dim: int,
    ) -> Float[Array, "T K G Y"]:
        """The gated delta rule from a state of zeros on; see `Operations`."""
        del layer
        T, K, W = mixed.shape
        G = decay.shape[-1]
        states, rows = one_sequence(
            T,
            key_heads=K,
            values_a_key=G,
            key_dim=key_dim,
            value_dim=(W - 2 * key_dim) // G,
            taps=weight.shape[1],
            dtype=mixed.dtype,
        )
        convolved, states = causal_conv(mixed, weight, states, rows)
        q, k, v = split_mixed(convolved, key_dim, G)
        return gated_delta(q, k, v, decay, beta, states, rows)[0]
