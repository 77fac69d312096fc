"""The feed-forward block that is a mixture of experts."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.layers.parameter import parameter
from rjax.models.operations import Operations, Residual
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.pending import reduced


class SharedExpert(nnx.Module):
    """The expert that every row takes, perhaps times the sigmoid of a projection of the row."""

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        assert config.experts is not None
        path = f"layers.{layer}.mlp.shared"
        self.up = Linear("D", "A U", config, dtype, scheme=config.scheme_of(f"{path}.up"), a=2)
        self.down = Linear("U", "D", config, dtype, scheme=config.scheme_of(f"{path}.down"))
        self.gate = parameter("A D", config, dtype) if config.experts.shared_gate else None

    def __call__(
        self, h: Float[Array, "T D"], activation: Activation, operations: Operations
    ) -> Float[Array, "T D"]:
        """The output of the expert."""
        hidden = activation(reduced(operations.linear(self.up, h)))
        output = operations.summed(operations.linear(self.down, hidden))
        if self.gate is None:
            return output
        gate = jnp.dot(h, self.gate[0], preferred_element_type=jnp.float32)
        return (output * jax.nn.sigmoid(gate)[:, None]).astype(h.dtype)


class Experts(nnx.Module):
    """The weighted sum over a row's experts of down(act(gate x) * up x), plus a shared expert's.

    The weight of ``up`` is [J, D, A, I]: entry 0 of A is the gate, entry 1 is up.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        experts = config.experts
        assert experts is not None
        self.how, self.top_k = experts.router, experts.top_k
        self.activation = Activation(
            config.activation, gated=True, clamp=experts.clamp, alpha=experts.alpha
        )
        self.router = parameter("D J", config, dtype)
        biased = experts.router.bias
        self.router_bias = parameter("J", config, dtype, "zeros") if biased else None
        corrected = experts.router.correction_bias
        self.correction = parameter("J", config, jnp.float32, "zeros") if corrected else None
        path, bias = f"layers.{layer}.mlp", experts.bias
        up, down = (config.scheme_of(f"{path}.{name}") for name in ("up", "down"))
        self.up = Linear("D", "A I", config, dtype, scheme=up, a=2, bias=bias, experts=True)
        self.down = Linear("I", "D", config, dtype, scheme=down, bias=bias, experts=True)
        shared = experts.shared_width is not None
        self.shared = SharedExpert(config, layer, dtype) if shared else None

    def __call__(self, residual: Residual, norm: Norm | None, operations: Operations) -> Residual:
        """The residual stream with the output of the block as update."""
        residual, h = operations.norm(residual, norm)
        routing = operations.route(
            h,
            self.router[...],
            self.how,
            self.top_k,
            bias=None if self.router_bias is None else self.router_bias[...],
            correction=None if self.correction is None else self.correction[...],
        )
        update = operations.experts(h, routing, self.up, self.down, self.activation)
        if self.shared is not None:
            update = operations.summed(update) + self.shared(h, self.activation, operations)
        return residual.plus(update)
