"""The one decoder that every family configures."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.context import LayerContext, Rotary
from models.layers.attention import Attention
from models.layers.mlp import Mlp
from models.layers.norm import Norm
from models.layers.parameter import parameter
from models.rope import rotary_tables


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, layer, dtype)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = Mlp(config, dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"] | None,
        rotary: Rotary | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | Float[Array, "X T D"]]:
        """(residual, what is still to be added to it), the same before and after.

        So that every sum of the residual meets the norm that reads it, in one kernel.
        """
        x, update = self.attention(x, update, self.attention_norm, rotary, context)
        return self.mlp(x, update, self.mlp_norm, context)


class Decoder(nnx.Module):
    """A decoder-only language model.

    Built abstract (shapes without memory): `load_model` or `init_model` gives the parameters
    values. Every array is a parameter, so `nnx.split` yields one flat set of leaves for `jax.jit`.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.config = config
        self.embedding = parameter("V D", config, dtype)
        self.positions = parameter("C D", config, dtype) if config.learned_positions else None
        self.layers = nnx.List(DecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = Norm(config, dtype)
        self.head = None if config.tie_embeddings else parameter("V D", config, dtype)

    def __call__(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], context: LayerContext
    ) -> Float[Array, "T D"]:
        """Final-normed hidden states, in the parameters' dtype.

        Tokens and positions outside their range (padding rows) are clipped into it.
        """
        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        if self.positions is not None:
            rows = jnp.maximum(positions, 0) + self.config.position_offset
            x = x + jnp.take(self.positions[...], rows, axis=0, mode="clip")
        rotary = None if self.config.rope is None else rotary_tables(self.config.rope, positions)
        update = None
        for layer in self.layers:
            x, update = layer(x, update, rotary, context)
        return self.norm.add(x, update, context)[1]

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Scores of every vocabulary entry, float32."""
        head = self.embedding if self.head is None else self.head
        return jnp.einsum("XD,VD->XV", hidden, head[...], preferred_element_type=jnp.float32)
