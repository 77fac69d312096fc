"""The attention block."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.alibi import alibi_slopes
from rjax.models.config import ModelConfig
from rjax.models.layers.layer_inputs import LayerInputs
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.layers.parameter import parameter
from rjax.models.operations import HeadNorms, HeadOptions, KvScales, Operations, Residual
from rjax.models.rope import Rotary, halves_of_pairs
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.pending import Partial, UnmergedAttention, reduced
from rjax.pallas_kernels.rope_and_cache.base import rotate


class Attention(nnx.Module):
    """The attention block of one layer: projections around the attention operation.

    The result axes of ``qkv`` are K, A = G + 2 and H: for each KV head G queries, a key, a value.
    With an output gate, A = 2G + 2: the gate of each query follows it. Sharding K over devices
    therefore keeps the query heads with their KV head. A = G + 1 where the values are the keys
    before norms and rotary embedding, and A = G in a layer that attends over the KV of another.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        self.layer = layer
        self.kv_source = config.kv_source(layer)
        self.keeps_kv = config.kv_sources.count(layer) > 1
        self.has_own_sizes = bool(config.layers)
        config = config.of_layer(layer)
        self.kv_projections = config.kv_projections
        self.norms_values = config.norms.on_values
        self.spec = attention_spec(config, layer)
        rope = config.rope_of(layer)
        self.interleaved = rope is not None and rope.interleaved
        of_heads = not config.layer_norm and not config.norms.whole_qk
        self.norms_behind_rope = config.norms.qk_behind_rope
        self.norm_joins_rope = of_heads and not (
            self.interleaved or self.norms_behind_rope or self.keeps_kv
        )
        self.output_gate = config.output_gate
        G = config.axis_sizes["G"]
        path = f"layers.{layer}.attention"
        self.qkv = Linear(
            "D",
            "K A H",
            config,
            dtype,
            scheme=config.scheme_of(f"{path}.qkv"),
            a=(2 * G if config.output_gate else G) + config.kv_projections,
            bias=config.qkv_bias,
        )
        self.output = Linear(
            "N H",
            "D",
            config,
            dtype,
            scheme=config.scheme_of(f"{path}.output"),
            bias=config.output_bias,
        )
        self.sinks = parameter("N", config, jnp.float32, "zeros") if config.sinks else None
        self.alibi = config.num_heads if config.alibi else None
        has_scales = config.kv_scales and config.kv_projections > 0
        self.k_scale = _scale(config) if has_scales else None
        self.v_scale = _scale(config) if has_scales else None
        q_axes, k_axes = ("K A H", "K A H") if config.norms.whole_qk else ("H", "H")
        self.q_norm = Norm(config, dtype, q_axes, G) if config.qk_norm else None
        has_k_norm = config.qk_norm and config.kv_projections > 0
        self.k_norm = Norm(config, dtype, k_axes) if has_k_norm else None

    @property
    def input_projections(self) -> tuple[Linear, ...]:
        """The projections before attention, in the order of their calls."""
        return (self.qkv,)

    def __call__(
        self,
        residual: Residual,
        norm: Norm | None,
        rotary: Rotary | None,
        operations: Operations,
        inputs: LayerInputs | None = None,
    ) -> Residual:
        """The residual stream with the attention output as update."""
        residual, qkv = operations.norm_linear(residual, norm, self.qkv)
        attended = self.attend(qkv, rotary, operations, inputs)
        return residual.plus(operations.linear(self.output, attended))

    def attend(
        self,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        operations: Operations,
        inputs: LayerInputs | None = None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        """Attention of the projections, before the output projection."""
        if self.kv_projections == 1:
            heads = reduced(qkv)
            qkv = jnp.concatenate([heads, heads[:, :, -1:]], axis=2)
        if not self.output_gate:
            return self._attend(qkv, rotary, operations, inputs)
        heads = reduced(qkv)
        queries, gates = heads[:, :, :-2:2], heads[:, :, 1:-2:2]
        qkv = jnp.concatenate([queries, heads[:, :, -2:]], axis=2)
        attended = operations.merged(self._attend(qkv, rotary, operations, inputs))
        gates = jax.nn.sigmoid(gates.astype(jnp.float32)).astype(attended.dtype)
        return attended * gates.reshape(attended.shape)

    def _attend(
        self,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        operations: Operations,
        inputs: LayerInputs | None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        norms = None
        if self.kv_projections == 0:
            return self._attend_over_another(qkv, rotary, operations, inputs)
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm, self.k_norm, self.norms_values)
            if self.norms_behind_rope and rotary is not None:
                heads = reduced(qkv)
                T, K, A, H = heads.shape
                qk = rotate(heads[:, :, :-1].reshape(T, -1, H), rotary.cos, rotary.sin)
                qkv = jnp.concatenate([qk.reshape(T, K, A - 1, H), heads[:, :, -1:]], axis=2)
                rotary = None
            if not self.norm_joins_rope or (rotary is not None and rotary.query_scale is not None):
                qkv, norms = norms(qkv), None
        if rotary is not None and self.interleaved:
            heads = reduced(qkv)
            rotated = halves_of_pairs(heads[:, :, :-1], 2 * rotary.cos.shape[-1])
            qkv = jnp.concatenate([rotated, heads[:, :, -1:]], axis=2)
        if rotary is not None and rotary.query_scale is not None:
            heads = reduced(qkv)
            q = heads[:, :, :-2] * rotary.query_scale[:, None, None, None].astype(heads.dtype)
            qkv = jnp.concatenate([q, heads[:, :, -2:]], axis=2)
            rotary = dataclasses.replace(rotary, query_scale=None)
        scales = None
        if self.k_scale is not None and self.v_scale is not None:
            scales = KvScales(self.k_scale[...], self.v_scale[...])
        if self.keeps_kv:
            assert inputs is not None
            inputs.kv[self.layer] = reduced(qkv)[:, :, -2:], scales
        options = {}
        if self.sinks is not None or self.alibi is not None:
            options["heads"] = self._head_options()
        if norms is not None:
            options["norms"] = norms
        return operations.attention(self.layer, qkv, rotary, self.spec, scales, **options)

    def _attend_over_another(
        self,
        q: Float[Array, "T K G H"] | Partial,
        rotary: Rotary | None,
        operations: Operations,
        inputs: LayerInputs | None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        """Attention over the KV of an earlier layer, which is stored once more where it is."""
        assert inputs is not None and self.q_norm is not None
        kv, scales = inputs.kv[self.kv_source]
        qkv = jnp.concatenate([self.q_norm(reduced(q)), kv], axis=2)
        return operations.attention(self.layer, qkv, rotary, self.spec, scales)

    def _head_options(self) -> HeadOptions:
        sinks = None if self.sinks is None else self.sinks[...]
        slopes = None if self.alibi is None else jnp.asarray(alibi_slopes(self.alibi))
        return HeadOptions(sinks, slopes)


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """Scale, window and soft cap of a layer's attention."""
    scales = config.scales
    scale = config.head_dim**-0.5 if scales.attention is None else scales.attention
    return AttentionSpec(scale, config.sliding_windows[layer], scales.attention_soft_cap)


def _scale(config: ModelConfig) -> nnx.Param:
    return parameter("A", config, jnp.float32, "ones")
