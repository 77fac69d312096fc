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
from rjax.models.layers.mlp import Mlp
from rjax.models.layers.norm import Norm
from rjax.models.layers.parameter import array_bytes
from rjax.models.operations import Operations, Residual
from rjax.models.rope import Rotary, rotary_tables


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each an update of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, layer, dtype)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = (Experts if config.has_experts(layer) else Mlp)(config, layer, dtype)

    def __call__(
        self, residual: Residual, rotary: Rotary | None, operations: Operations
    ) -> Residual:
        """The stream after this layer; the next norm adds its last update."""
        residual = self.attention(residual, self.attention_norm, rotary, operations)
        return self.mlp(residual, self.mlp_norm, operations)


class Decoder(nnx.Module):
    """A decoder-only language model.

    Built abstract (shapes without memory): `load_model` or `init_model` gives the parameters
    values. Every array is a parameter, so `nnx.split` yields one flat set of leaves for `jax.jit`.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.embedding = Embedding("V", config, dtype)
        self.positions = Embedding("C", config, dtype) if config.learned_positions else None
        self.layers = nnx.List(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = Norm(config, dtype)
        self.head = None if config.tie_embeddings else Embedding("V", config, dtype)

    def __call__(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], operations: Operations
    ) -> Float[Array, "T D"]:
        """Final-normed hidden states, in the parameters' dtype.

        Tokens and positions outside their range (padding rows) are clipped into it.
        """
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(jnp.maximum(positions, 0) + self.config.position_offset)
        rotary = None if self.config.rope is None else rotary_tables(self.config.rope, positions)
        residual = Residual(x)
        for layer in self.layers:
            residual = layer(residual, rotary, operations)
        return operations.norm(residual, self.norm)[1]

    @property
    def dtype(self) -> np.dtype:
        """Of the activations, and of weights that are not quantised."""
        return np.dtype(self.embedding.weight.get_value().dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, abstract or not."""
        return array_bytes(nnx.state(self))

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores of every vocabulary entry, float32."""
        head = self.embedding if self.head is None else self.head
        return head.logits(hidden)
