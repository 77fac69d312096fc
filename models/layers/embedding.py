"""The vocabulary's table: tokens to vectors, and vectors to logits."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from models.layers.parameter import parameter


class Embedding(nnx.Module):
    """A table of rows of D numbers, one row for each token ("V") or each position ("C")."""

    def __init__(self, rows: str, config: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = parameter(f"{rows} D", config, dtype)

    def __call__(self, indices: Int[Array, " T"]) -> Float[Array, "T D"]:
        """The rows of these indices, which are clipped into the table."""
        return jnp.take(self.weight[...], indices, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "X D"]) -> Float[Array, "X V"]:
        """The product with every row, float32."""
        return jnp.einsum("XD,VD->XV", hidden, self.weight[...], preferred_element_type=jnp.float32)
