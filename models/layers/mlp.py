"""The feed-forward block."""

import functools

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.context import LayerContext, Normed
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
        self, x: Float[Array, "T D"], h: Normed, following: Norm, context: LayerContext
    ) -> tuple[Float[Array, "T D"], Normed]:
        """(x and the block of h, the norm that follows of that sum)."""
        bias = None if self.down_bias is None else self.down_bias[...]
        return following.add_product(x, self._hidden(h, context), self.down[...], bias, context)

    def _hidden(self, h: Normed, context: LayerContext) -> Float[Array, "T F"]:
        up = self.up[...]
        gated_silu = up.shape[1] == 2 and self.activation == "silu"
        if gated_silu and self.up_bias is None:
            return context.gated_product(h, up)
        projected = context.product(h, up)
        if self.up_bias is not None:
            projected = projected + self.up_bias[...]
        if gated_silu:
            return context.gated_silu(projected)
        hidden = ACTIVATIONS[self.activation](projected[:, 0])
        return hidden * projected[:, 1] if up.shape[1] == 2 else hidden
