"""The attention block of gated delta net layers (Yang, Kautz and Hatamizadeh, 2024)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from rjax.models.config import ModelConfig
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import GatedNorm, Norm
from rjax.models.layers.parameter import parameter
from rjax.models.operations import Operations, Residual
from rjax.models.rope import Rotary
from rjax.models.schemes import UNQUANTISED
from rjax.pallas_kernels.pending import reduced


class GatedDeltaNet(nnx.Module):
    """The attention block of one layer: projections around the gated delta rule.

    A state of fixed size for each value head takes the place of keys and values of all tokens. The
    result axes A and M of ``qkvz`` are one: for each key head a query, a key, its values and their
    output gates z. Those of ``ba`` are A and B: for each value head of a key head b, whose sigmoid
    is the step of the update, and a, of which the decay is made. Devices share the key heads R.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        linear = config.linear
        assert linear is not None and linear.layers[layer]
        self.layer, self.sizes = layer, linear
        path = f"layers.{layer}.attention"
        self.qkvz = Linear(
            "D",
            "R A M",
            config,
            dtype,
            scheme=config.scheme_of(f"{path}.qkvz"),
            a=(linear.mixed_dim + linear.values_dim) // linear.unit,
        )
        self.ba = Linear("D", "R A B", config, dtype, scheme=UNQUANTISED, a=2)
        self.conv = parameter("R X A", config, dtype, a=linear.mixed_dim)
        self.decay_rate = parameter("R B", config, jnp.float32, "zeros")
        self.decay_bias = parameter("R B", config, jnp.float32, "ones")
        self.norm = GatedNorm(config, dtype)
        self.output = Linear("R E", "D", config, dtype, scheme=config.scheme_of(f"{path}.output"))

    @property
    def input_projections(self) -> tuple[Linear, ...]:
        """The projections before the gated delta rule, in the order of their calls."""
        return self.qkvz, self.ba

    def __call__(
        self,
        residual: Residual,
        norm: Norm | None,
        rotary: Rotary | None,
        operations: Operations,
    ) -> Residual:
        """The residual stream with the output of the block as update; nothing is rotated."""
        del rotary
        residual, h = operations.norm(residual, norm)
        T, sizes = len(h), self.sizes
        R, B, Y = sizes.key_heads, sizes.values_a_key, sizes.value_dim
        qkvz = reduced(operations.linear(self.qkvz, h)).reshape(T, R, -1)
        mixed, z = jnp.split(qkvz, [sizes.mixed_dim], axis=-1)
        decay, beta = self._gates(reduced(operations.linear(self.ba, h)))
        out = operations.gated_delta(self.layer, mixed, self.conv[...], decay, beta, sizes.key_dim)
        gated = self.norm(out, z.reshape(T, R, B, Y)).reshape(T, R, B * Y)
        return residual.plus(operations.linear(self.output, gated))

    def _gates(
        self, ba: Float[Array, "T R 2 B"]
    ) -> tuple[Float32[Array, "T R B"], Float32[Array, "T R B"]]:
        """(log decay, beta) of each value head."""
        b, a = ba[:, :, 0].astype(jnp.float32), ba[:, :, 1].astype(jnp.float32)
        rate = jnp.exp(self.decay_rate[...])
        return -rate * jax.nn.softplus(a + self.decay_bias[...]), jax.nn.sigmoid(b)
