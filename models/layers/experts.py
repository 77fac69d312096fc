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
from rjax.pallas_kernels.experts.base import Routing
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


class ExpertNorms(nnx.Module):
    """The norms of Gemma 4's experts, and the factor on the weight of each expert."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.router = Norm(config, dtype)
        self.before = Norm(config, dtype)
        self.behind = Norm(config, dtype)
        self.behind_shared = Norm(config, dtype)
        self.factors = parameter("J", config, dtype, "ones")


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
        self.norms = ExpertNorms(config, dtype) if experts.normed else None

    def __call__(self, residual: Residual, norm: Norm | None, operations: Operations) -> Residual:
        """The residual stream with the output of the block as update."""
        residual, h = operations.norm(residual, norm)
        if self.norms is not None:
            return residual.plus(self._normed(residual.x, h, self.norms, operations))
        routing = self._route(h, operations)
        update = operations.experts(h, routing, self.up, self.down, self.activation)
        if self.shared is not None:
            update = operations.summed(update) + self.shared(h, self.activation, operations)
        return residual.plus(update)

    def _normed(
        self,
        x: Float[Array, "T D"],
        h: Float[Array, "T D"],
        norms: "ExpertNorms",
        operations: Operations,
    ) -> Float[Array, "T D"]:
        """The sum of the normed outputs of the shared expert and of the others.

        Args:
            x: the residual stream.
            h: its norm, the input of the shared expert.
            norms: the norms beside the layer's.
            operations: compute the experts.
        """
        assert self.shared is not None
        of_shared = norms.behind_shared(self.shared(h, self.activation, operations))
        scored = norms.router(x)
        routing = self._route(scored * jnp.asarray(x.shape[-1] ** -0.5, x.dtype), operations)
        factors = norms.factors[...].astype(jnp.float32)[routing.experts]
        routing = routing._replace(weights=routing.weights * factors)
        update = operations.experts(norms.before(x), routing, self.up, self.down, self.activation)
        return of_shared + norms.behind(operations.summed(update))

    def _route(self, h: Float[Array, "T D"], operations: Operations) -> Routing:
        return operations.route(
            h,
            self.router[...],
            self.how,
            self.top_k,
            bias=None if self.router_bias is None else self.router_bias[...],
            correction=None if self.correction is None else self.correction[...],
        )
