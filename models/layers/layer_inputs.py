"""What layers get beside the residual stream: per-layer inputs, and the KV of earlier layers."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.layers.parameter import parameter
from rjax.models.operations import KvScales, Operations
from rjax.pallas_kernels.gemm.activation import Activation
from rjax.pallas_kernels.pending import reduced


@dataclasses.dataclass(slots=True)
class LayerInputs:
    """Inputs of the layers of one forward pass.

    Attributes:
        per_layer: the input that each layer has of its own; None without.
        kv: for each layer whose KV others attend over, its normed keys and its values, before the
            rotary embedding, and its scales. Such a layer adds its own.
    """

    per_layer: Float[Array, "T L p"] | None = None
    kv: dict[int, tuple[Float[Array, "T K 2 H"], KvScales | None]] = dataclasses.field(
        default_factory=dict
    )


def empty_inputs(config: ModelConfig, layer: int, rows: int, dtype: DTypeLike) -> LayerInputs:
    """Zeros for a layer that is traced alone."""
    inputs, source = LayerInputs(), config.kv_source(layer)
    if config.per_layer_inputs is not None:
        shape = rows, config.num_layers, config.per_layer_inputs.width
        inputs.per_layer = jnp.zeros(shape, dtype)
    if source != layer:
        K, H = config.layer_heads[source]
        inputs.kv[source] = jnp.zeros((rows, K, 2, H), dtype), None
    return inputs


class PerLayerEmbedding(nnx.Module):
    """The per-layer inputs of tokens: (an embedding + a normed projection of the first residual
    stream) / sqrt(2), p numbers for each layer (Gemma 3n and 4)."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.weight = parameter("v L p", config, dtype)
        scheme = config.scheme_of("per_layer.projection")
        self.projection = Linear("D", "L p", config, dtype, scheme=scheme)
        self.norm = Norm(config, dtype, "p")

    def __call__(
        self, tokens: Int[Array, " T"], x: Float[Array, "T D"], operations: Operations
    ) -> Float[Array, "T L p"]:
        """The inputs of all layers, in the dtype of x.

        Args:
            tokens: the tokens; those outside the table are clipped into it.
            x: their scaled embeddings.
            operations: computes the projection.
        """

        def scaled(value: Array, factor: float) -> Array:
            return value * jnp.asarray(factor, value.dtype)

        found = jnp.take(self.weight[...], tokens, axis=0, mode="clip")
        found = scaled(found, found.shape[-1] ** 0.5)
        projected = operations.summed(operations.linear(self.projection, x))
        projected = self.norm(scaled(projected, x.shape[-1] ** -0.5))
        return scaled(projected + found, 2**-0.5)


class PerLayerBlock(nnx.Module):
    """The update of the residual stream by a layer's own input: norm(project(act(gate x) * input)).

    The activation is that of the feed-forward block.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        path = f"layers.{layer}.per_layer"
        self.layer = layer
        self.activation = Activation(config.activation, gated=False)
        self.gate = Linear("D", "p", config, dtype, scheme=config.scheme_of(f"{path}.gate"))
        self.output = Linear("p", "D", config, dtype, scheme=config.scheme_of(f"{path}.output"))
        self.norm = Norm(config, dtype)

    def __call__(
        self, x: Float[Array, "T D"], inputs: LayerInputs, operations: Operations
    ) -> Float[Array, "T D"]:
        """The update."""
        assert inputs.per_layer is not None
        gate = reduced(operations.linear(self.gate, x))
        hidden = self.activation(gate[:, None]) * inputs.per_layer[:, self.layer]
        return self.norm(operations.summed(operations.linear(self.output, hidden)))
