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
        h = jnp.einsum("TD,DAF->TAF", x, self.up[...])
        if self.up_bias is not None:
            h = h + self.up_bias[...]
        if h.shape[1] == 2 and self.activation == "silu":
            hidden = context.gated_silu(h)
        else:
            hidden = ACTIVATIONS[self.activation](h[:, 0])
            if h.shape[1] == 2:
                hidden = hidden * h[:, 1]
        if self.down_bias is None:
            return context.product(hidden, self.down[...])
        return jnp.einsum("TF,FD->TD", hidden, self.down[...]) + self.down_bias[...]
