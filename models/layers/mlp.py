"""The feed-forward block."""

from flax import nnx
from jax.typing import DTypeLike

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.operations import Operations, Residual
from rjax.pallas_kernels.gemm.activation import Activation


class Mlp(nnx.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    The result axes of ``up`` are A and F: entry 0 of A is the gate (or the only projection), entry
    1 is up.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        config = config.of_layer(layer)
        self.activation = Activation(config.activation, config.gated_mlp)
        a = 2 if config.gated_mlp else 1
        path = f"layers.{layer}.mlp"
        self.up = Linear(
            "D",
            "A F",
            config,
            dtype,
            scheme=config.scheme_of(f"{path}.up"),
            a=a,
            bias=config.mlp_bias,
        )
        self.down = Linear(
            "F",
            "D",
            config,
            dtype,
            scheme=config.scheme_of(f"{path}.down"),
            bias=config.mlp_bias,
        )

    def __call__(self, residual: Residual, norm: Norm | None, operations: Operations) -> Residual:
        """The residual stream with the output of the block as update."""
        residual, hidden = operations.norm_linear_activation(
            residual, norm, self.up, self.activation
        )
        return residual.plus(operations.linear(self.down, hidden))
