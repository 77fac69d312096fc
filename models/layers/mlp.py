"""The feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.context import LayerContext
from models.layers.parameter import parameter

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class Mlp(nnx.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    ``up`` is [D, A, F]: entry 0 of A is the gate (or the only projection), entry 1 is up.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        a = 2 if config.gated_mlp else 1
        self.activation = config.activation
        self.up = parameter("D A F", config, dtype, a=a)
        self.down = parameter("F D", config, dtype)
        self.up_bias = parameter("A F", config, dtype, "zeros", a) if config.mlp_bias else None
        self.down_bias = parameter("D", config, dtype, "zeros") if config.mlp_bias else None

    def __call__(
        self, x: Float[Array, "T D"], context: LayerContext
    ) -> Float[Array, "T D"] | Float[Array, "X T D"]:
        hidden = self._hidden(x, context)
        if self.down_bias is None:
            return context.product(hidden, self.down[...])
        return jnp.einsum("TF,FD->TD", hidden, self.down[...]) + self.down_bias[...]

    def _hidden(self, x: Float[Array, "T D"], context: LayerContext) -> Float[Array, "T F"]:
        up, gated = self.up[...], self.up.shape[1] == 2
        if gated and self.activation == "silu" and self.up_bias is None:
            return context.gated_product(x, up)
        h = jnp.einsum("TD,DAF->TAF", x, up)
        if self.up_bias is not None:
            h = h + self.up_bias[...]
        if gated and self.activation == "silu":
            return context.gated_silu(h)
        hidden = ACTIVATIONS[self.activation](h[:, 0])
        return hidden * h[:, 1] if gated else hidden
