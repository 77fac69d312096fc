"""The one decoder that every family configures."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rjax.models.config import ModelConfig
from rjax.models.layers.attention import Attention
from rjax.models.layers.embedding import Embedding
from rjax.models.layers.experts import Experts
from rjax.models.layers.gated_delta_net import GatedDeltaNet
from rjax.models.layers.latent_attention import LatentAttention
from rjax.models.layers.layer_inputs import LayerInputs, PerLayerBlock, PerLayerEmbedding
from rjax.models.layers.mlp import Mlp
from rjax.models.layers.norm import Norm
from rjax.models.layers.parameter import array_bytes, parameter
from rjax.models.operations import Operations, Residual
from rjax.models.rope import Rotary, rotary_tables


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each an update of the residual stream.

    ``config.norms`` places the norms: before each (`attention_norm`, `mlp_norm`), behind each
    (`attention_post_norm`, `mlp_post_norm`), or both. In parallel layers one norm makes the input
    of both, and their sum is the update.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        norms = config.norms
        self.parallel = norms.placement == "parallel"
        self.scale = config.scales.residual
        self.attention_norm = Norm(config, dtype) if norms.on_inputs else None
        self.attention = _attention(config, layer)(config, layer, dtype)
        self.attention_post_norm = Norm(config, dtype) if norms.on_outputs else None
        has_mlp_norm = norms.on_inputs and not self.parallel
        self.mlp_norm = Norm(config, dtype) if has_mlp_norm else None
        self.mlp = (Experts if config.has_experts(layer) else Mlp)(config, layer, dtype)
        self.mlp_post_norm = Norm(config, dtype) if norms.on_outputs else None
        has_inputs = config.per_layer_inputs is not None
        self.per_layer = PerLayerBlock(config, layer, dtype) if has_inputs else None
        self.factor = parameter("A", config, dtype, "ones") if config.scales.learned else None

    def __call__(
        self,
        residual: Residual,
        rotary: Rotary | None,
        operations: Operations,
        following: "DecoderLayer | None" = None,
        inputs: LayerInputs | None = None,
    ) -> Residual:
        """The stream after this layer; the next norm adds its last update.

        Args:
            residual: the stream.
            rotary: tables of the layer's rotary embedding, or None.
            operations: compute the layer.
            following: the next layer, which is called next with the same operations: they may
                compute its first projection already.
            inputs: what layers get beside the stream, in models where they do.
        """
        whole = operations.decoder_layer(self, residual, rotary, following)
        if whole is not None:
            return whole
        if self.parallel:
            residual, h = operations.norm(residual, self.attention_norm)
            attended = self.attention(Residual(h), None, rotary, operations).update
            hidden = self.mlp(Residual(h), None, operations).update
            assert attended is not None and hidden is not None
            update = operations.summed(attended) + operations.summed(hidden)
            return self._scaled(residual.plus(update), None, operations)
        if isinstance(self.attention, Attention):
            residual = self.attention(residual, self.attention_norm, rotary, operations, inputs)
        else:
            residual = self.attention(residual, self.attention_norm, rotary, operations)
        residual = self._scaled(residual, self.attention_post_norm, operations)
        residual = self.mlp(residual, self.mlp_norm, operations)
        residual = self._scaled(residual, self.mlp_post_norm, operations)
        return self._ended(residual, operations, inputs)

    def _ended(
        self, residual: Residual, operations: Operations, inputs: LayerInputs | None
    ) -> Residual:
        """The stream with the update by the layer's own input, times the layer's factor."""
        if self.per_layer is None and self.factor is None:
            return residual
        assert residual.update is not None
        x = residual.x + operations.summed(residual.update)
        if self.per_layer is not None:
            assert inputs is not None
            x = x + self.per_layer(x, inputs, operations)
        return Residual(x if self.factor is None else x * self.factor[...])

    def _scaled(self, residual: Residual, norm: Norm | None, operations: Operations) -> Residual:
        """The stream with its update normed and scaled."""
        update = residual.update
        assert update is not None
        if norm is not None:
            update = norm(operations.summed(update))
        if self.scale != 1:
            update = operations.summed(update)
            update = update * jnp.asarray(self.scale, update.dtype)
        return Residual(residual.x, update)


def _attention(
    config: ModelConfig, layer: int
) -> type[Attention] | type[LatentAttention] | type[GatedDeltaNet]:
    """The kind of a layer's attention."""
    if config.is_linear(layer):
        return GatedDeltaNet
    return Attention if config.latent is None else LatentAttention


class Decoder(nnx.Module):
    """A decoder-only language model.

    It is built abstract (shapes without memory): `load_model` or `init_model` gives the parameters
    values. Every array is a parameter, so `nnx.split` yields one flat set of leaves for `jax.jit`.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.embedding = Embedding("V", config, dtype)
        self.embedding_norm = Norm(config, dtype) if config.norms.on_embedding else None
        self.positions = Embedding("C", config, dtype) if config.learned_positions else None
        self.layers = nnx.List(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        has_inputs = config.per_layer_inputs is not None
        self.per_layer = PerLayerEmbedding(config, dtype) if has_inputs else None
        self.norm = Norm(config, dtype)
        self.head = None if config.tie_embeddings else Embedding("V", config, dtype)

    def __call__(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], operations: Operations
    ) -> Float[Array, "T D"]:
        """Final-normed hidden states, in the parameters' dtype.

        Tokens and positions outside their range (padding rows) are clipped into it.
        """
        x = operations.embed(self.embedding, tokens)
        if self.config.scales.embedding != 1:
            x = x * jnp.asarray(self.config.scales.embedding, x.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.positions is not None:
            x = x + self.positions(jnp.maximum(positions, 0) + self.config.position_offset)
        rotary = {rope: rotary_tables(rope, positions) for rope in self.config.ropes}
        residual, inputs = Residual(x), LayerInputs()
        if self.per_layer is not None:
            inputs.per_layer = self.per_layer(tokens, x, operations)
        for i, layer in enumerate(self.layers):
            rope = self.config.rope_of(i)
            following = self.layers[i + 1] if i + 1 < len(self.layers) else None
            tables = None if rope is None else rotary[rope]
            residual = layer(residual, tables, operations, following, inputs)
        return operations.norm(residual, self.norm)[1]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the activations, and of weights that are not quantised."""
        return np.dtype(self.embedding.weight.get_value().dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, abstract or not."""
        return array_bytes(nnx.state(self))

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores of every vocabulary entry, float32."""
        head = self.embedding if self.head is None else self.head
        logits, scales = head.logits(hidden), self.config.scales
        if scales.logits != 1:
            logits = logits * scales.logits
        if scales.logit_soft_cap is not None:
            logits = scales.logit_soft_cap * jnp.tanh(logits / scales.logit_soft_cap)
        return logits
