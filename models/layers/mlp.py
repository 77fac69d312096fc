"""The feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.context import LayerContext
from models.layers.norm import Norm
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
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        norm: Norm,
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | Float[Array, "Y T D"]]:
        """(x + update, what the block makes of the norm of that, to be added to it)."""
        x, hidden = self._hidden(x, update, norm, context)
        if self.down_bias is None:
            return x, context.product(hidden, self.down[...])
        return x, jnp.einsum("TF,FD->TD", hidden, self.down[...]) + self.down_bias[...]

    def _hidden(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        norm: Norm,
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T F"]]:
        up, gated = self.up[...], self.up.shape[1] == 2
        if gated and self.activation == "silu" and self.up_bias is None:
            return norm.add_gated_product(x, update, up, context)
        x, h = norm.add(x, update, context)
        h = jnp.einsum("TD,DAF->TAF", h, up)
        if self.up_bias is not None:
            h = h + self.up_bias[...]
        if gated and self.activation == "silu":
            return x, context.gated_silu(h)
        hidden = ACTIVATIONS[self.activation](h[:, 0])
        return x, hidden * h[:, 1] if gated else hidden
