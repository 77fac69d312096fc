"""The operations that layers call."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from rjax.models.layers.embedding import Embedding
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm, rms_normed
from rjax.models.rope import Rotary
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.experts.base import Router, Routing, experts, route, router_logits
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.pending import Partial, UnmergedAttention, reduced
from rjax.pallas_kernels.residual.base import add_rms_norm
from rjax.pallas_kernels.rope_and_cache.base import split_qkv


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream: x, and an update that the next norm adds to it in the same kernel."""

    x: Float[Array, "T D"]
    update: Float[Array, "T D"] | Partial | None = None

    def plus(self, update: Float[Array, "T D"] | Partial) -> "Residual":
        """The stream with a new update; a norm must have added the previous one."""
        assert self.update is None, "a norm must add the previous update first"
        return Residual(self.x, update)

    def total(self) -> Float[Array, "T D"]:
        """The stream with its update added."""
        return self.x if self.update is None else self.x + reduced(self.update)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of one layer's KV in float8_e4m3fn: value = stored number * scale."""

    k: Float[Array, "1"]
    v: Float[Array, "1"]


@dataclasses.dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head, before the rotary embedding (Qwen3).

    Attributes:
        q, k: the norms.
        values: whether the values are normed too, without a weight (Gemma 4).
    """

    q: Norm
    k: Norm
    values: bool = False

    def __call__(self, qkv: Float[Array, "T K A H"] | Partial) -> Float[Array, "T K A H"]:
        """The projections with normed queries and keys, in plain JAX."""
        heads = reduced(qkv)
        q, k, v = self.q(heads[:, :, :-2]), self.k(heads[:, :, -2:-1]), heads[:, :, -1:]
        if self.values:
            v = rms_normed(v, self.k.eps)
        return jnp.concatenate([q, k, v], axis=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class HeadOptions:
    """Numbers of each query head that change its attention; None for the options that are unused.

    Attributes:
        sinks: one more logit, without a value (gpt-oss).
        alibi_slopes: factor on (key position - query position), which is added to the scores
            (Press et al., 2022).
    """

    sinks: Float32[Array, " N"] | None = None
    alibi_slopes: Float32[Array, " N"] | None = None


class Operations(abc.ABC):
    """Operations that layers call; subclasses choose the kernels.

    The methods here are plain JAX. A model never sees a KV cache or a kernel. A result may be
    pending (``Partial``, ``UnmergedAttention``): the operation that consumes it completes it.
    """

    @abc.abstractmethod
    def attention(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        spec: AttentionSpec,
        kv_scales: KvScales | None = None,
        heads: HeadOptions | None = None,
        norms: HeadNorms | None = None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        """Attention of T tokens at one layer, in the dtype of the projections.

        Args:
            layer: index of the layer.
            qkv: each KV head's A - 2 queries, its key, its value, before the rotary embedding.
            rotary: None where the model has no rotary embedding.
            spec: scale, window and soft cap.
            kv_scales: scales of KV that is stored in fp8; None for scales of 1.
            heads: sinks and ALiBi slopes; None without.
            norms: norms of queries and keys, before the rotary embedding; None without.

        Returns:
            Attention output; along N the query heads of KV head 0 come first, then those of head 1.
        """

    def gated_delta(
        self,
        layer: int,
        mixed: Float[Array, "T K W"],
        weight: Float[Array, "K X W"],
        decay: Float32[Array, "T K G"],
        beta: Float32[Array, "T K G"],
        key_dim: int,
    ) -> Float[Array, "T K G Y"]:
        """T tokens through the states of one layer, which is a gated delta net.

        Each channel is convolved along its sequence (silu follows), queries and keys are
        normalised, and the gated delta rule gives an output for each value head; see
        ``pallas_kernels/gated_delta/base.py``. K counts the key heads here, G the value heads of
        each.

        Args:
            layer: index of the layer.
            mixed: of each key head H numbers of a query, H of a key and G times Y of values.
            weight: filters of the convolution, whose last tap is that of the token itself.
            decay: logarithm of the factor on the state of each value head, at most 0.
            beta: factor on the update of the state.
            key_dim: H.

        Returns:
            The outputs in the dtype of ``mixed``.

        Raises:
            NotImplementedError: a subclass has no states.
        """
        del layer, mixed, weight, decay, beta, key_dim
        raise NotImplementedError(f"{type(self).__name__} has no states of linear attention")

    def merged(self, attended: Float[Array, "T N H"] | UnmergedAttention) -> Float[Array, "T N H"]:
        """The result of ``attention`` as one array."""
        assert not isinstance(attended, UnmergedAttention), "plain attention is merged"
        return attended

    def decoder_layer(
        self, layer: Any, residual: Residual, rotary: Rotary | None, following: Any = None
    ) -> Residual | None:
        """The stream after a `DecoderLayer`; None to have it call the other operations.

        following: the layer behind it, the next for which this is called; None behind the last.
        """
        del layer, residual, rotary, following
        return None

    def embed(self, embedding: Embedding, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The embeddings of tokens; those outside the table are clipped into it."""
        return embedding(tokens)

    def linear(
        self, linear: Linear, h: Float[Array, "T ..."] | UnmergedAttention
    ) -> Float[Array, "T ..."] | Partial:
        """The projection of h."""
        h = self.merged(h) if isinstance(h, UnmergedAttention) else h
        h = h.reshape(len(h), linear.depth)
        product = jnp.tensordot(h, linear.weight_matrix(h.dtype), 1)
        return product if linear.bias is None else product + linear.bias[...]

    def summed(self, value: Float[Array, "T ..."] | Partial) -> Float[Array, "T ..."]:
        """An update of the residual stream as an array: a Partial is reduced."""
        return reduced(value)

    def norm(self, residual: Residual, norm: Norm | None) -> tuple[Residual, Float[Array, "T D"]]:
        """(the stream with its update added, its norm); without a norm, the stream itself."""
        x, update = residual.x, residual.update
        if update is not None and norm is not None and norm.is_rms:
            x, h = self.add_rms_norm(x, update, norm)
            return Residual(x), h
        x = x if update is None else x + self.summed(update)
        return Residual(x), x if norm is None else norm(x)

    def add_rms_norm(
        self, x: Float[Array, "T D"], update: Float[Array, "T D"] | Partial, norm: Norm
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, its RMSNorm)."""
        return add_rms_norm(x, update, norm.weight[...], norm.eps)

    def norm_linear(
        self, residual: Residual, norm: Norm | None, linear: Linear
    ) -> tuple[Residual, Float[Array, "T ..."] | Partial]:
        """(the stream with its update added, the projection of its norm)."""
        residual, h = self.norm(residual, norm)
        return residual, self.linear(linear, h)

    def norm_linear_activation(
        self, residual: Residual, norm: Norm | None, linear: Linear, activation: Activation
    ) -> tuple[Residual, Float[Array, "T F"]]:
        """(the stream with its update added, the activated projection of its norm)."""
        residual, h = self.norm(residual, norm)
        return residual, activation(reduced(self.linear(linear, h)))

    def route(
        self,
        h: Float[Array, "T D"],
        weight: Float[Array, "D J"],
        router: Router,
        top_k: int,
        *,
        bias: Float[Array, " J"] | None = None,
        correction: Float[Array, " J"] | None = None,
    ) -> Routing:
        """The experts of each row, from the logits h @ weight + bias; see `experts.base.route`."""
        return route(router_logits(h, weight, bias), router, top_k, correction)

    def experts(
        self,
        h: Float[Array, "T D"],
        routing: Routing,
        up: Linear,
        down: Linear,
        activation: Activation,
    ) -> Float[Array, "T D"] | Partial:
        """The weighted sum of the outputs of each row's experts.

        Sums are float32, that over a row's experts in the order of the routing, so that a row does
        not depend on the experts of the others.
        """
        return experts(
            h,
            routing.experts,
            routing.weights,
            up.leaves,
            down.leaves,
            activation,
            up.bias_array,
            down.bias_array,
            widen_up=functools.partial(up.dequantise, dtype=h.dtype),
            widen_down=functools.partial(down.dequantise, dtype=h.dtype),
            differentiable=True,
        )


class HeadsOperations(Operations):
    """Operations whose attention takes queries, keys and values as separate arrays."""

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention of T tokens at one layer, in q's dtype; q and k are not rotated yet."""

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
        """``attend`` of models with sinks or ALiBi.

        Raises:
            NotImplementedError: a subclass does not have it.
        """
        del layer, q, k, v, rotary, spec, heads
        raise NotImplementedError(f"{type(self).__name__} has no attention sinks and no ALiBi")

    def attention(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        spec: AttentionSpec,
        kv_scales: KvScales | None = None,
        heads: HeadOptions | None = None,
        norms: HeadNorms | None = None,
    ) -> Float[Array, "T N H"]:
        """``attend`` from the projections, with KV as it is."""
        del kv_scales
        split = split_qkv(reduced(qkv) if norms is None else norms(qkv))
        if heads is None:
            return self.attend(layer, *split, rotary, spec)
        return self.attend_with_options(layer, *split, rotary, spec, heads)
