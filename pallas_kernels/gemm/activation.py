"""The activation of a feed-forward block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def silu_and_mul(h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """silu(h[:, 0]) * h[:, 1], in h's dtype (SwiGLU; Shazeer, 2020)."""
    return jax.nn.silu(h[:, 0]) * h[:, 1]


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up, as kernels compute it in float32."""
    return gate / (1.0 + jnp.exp(-gate)) * up


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """The activation of a feed-forward block.

    Attributes:
        name: "silu", "relu", "gelu" or "gelu_tanh".
        gated: the first entry of axis A goes through it and multiplies the second.
        clamp: limit in gpt-oss's SwiGLU, min(gate, clamp) * sigmoid(alpha * gate) * (up + 1), with
            up clipped to the same limit on both sides; None for the plain one.
        alpha: factor in the same SwiGLU.
    """

    name: str
    gated: bool
    clamp: float | None = None
    alpha: float = 1.0

    @property
    def is_swiglu(self) -> bool:
        """Whether it is silu(gate) * up, for which there are kernels."""
        return self.gated and self.name == "silu" and self.clamp is None

    def __call__(self, h: Float[Array, "T A F"]) -> Float[Array, "T F"]:
        """The activated product, in plain JAX."""
        if self.is_swiglu:
            return silu_and_mul(h)
        if self.clamp is not None:
            return self.clamped(h[:, 0], h[:, 1])
        hidden = _ACTIVATIONS[self.name](h[:, 0])
        return hidden * h[:, 1] if self.gated else hidden

    def clamped(self, gate: Array, up: Array) -> Array:
        """The clamped SwiGLU of gpt-oss; also traced in kernels."""
        assert self.clamp is not None
        gate = jnp.minimum(gate, self.clamp)
        up = jnp.minimum(jnp.maximum(up, -self.clamp), self.clamp)
        return gate / (1.0 + jnp.exp(-self.alpha * gate)) * (up + 1.0)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
