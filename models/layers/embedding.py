"""Embedding tables: tokens to vectors, and vectors to logits."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import parameter


class Embedding(nnx.Module):
    """A table [V, D] of tokens or [C, D] of positions."""

    def __init__(self, rows: str, config: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = parameter(f"{rows} D", config, dtype)

    def __call__(self, indices: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The rows at ``indices``, which are clipped to the table."""
        return jnp.take(self.weight[...], indices, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """Logits of all tokens, float32."""
        return jnp.einsum("XD,VD->XV", hidden, self.weight[...], preferred_element_type=jnp.float32)
