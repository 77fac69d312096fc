"""Embedding tables: tokens to vectors, and vectors to logits."""

import jax
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
        """Logits of all tokens, float32.

        On a GPU, one row is multiplied and summed by one fusion that reads the table once. XLA's
        product without Triton first writes the whole table in float32.
        """
        given = hidden, self.weight[...]
        if hidden.shape[0] != 1:
            return _product(*given)
        return jax.lax.platform_dependent(*given, cuda=_sum_of_products, default=_product)


def _product(hidden: Float[Array, "X D"], table: Float[Array, "V D"]) -> Float[Array, "X V"]:
    return jnp.einsum("XD,VD->XV", hidden, table, preferred_element_type=jnp.float32)


def _sum_of_products(
    hidden: Float[Array, "1 D"], table: Float[Array, "V D"]
) -> Float[Array, "1 V"]:
    return jnp.sum(hidden.astype(jnp.float32) * table.astype(jnp.float32), axis=-1)[None]
