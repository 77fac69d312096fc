"""Norms over the last axes, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import parameter


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm if ``config.layer_norm``.

    Args:
        config: kind and epsilon; size of each axis letter.
        dtype: dtype of the weight, unless the config has ``norms.unit_offset``.
        letters: the normed axes, which are the last ones of the input.
        a: size of axis A.
        eps: epsilon; None for that of the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        letters: str = "D",
        a: int = 1,
        *,
        eps: float | None = None,
    ) -> None:
        self.eps = config.norm_eps if eps is None else eps
        self.mean = config.layer_norm
        self.axes = tuple(range(-len(letters.split()), 0))
        own = jnp.float32 if config.norms.unit_offset else dtype
        self.weight = parameter(letters, config, own, "ones", a)
        biased = config.layer_norm and config.norms.bias
        self.bias = parameter(letters, config, dtype, "zeros", a) if biased else None

    @property
    def is_rms(self) -> bool:
        """Whether it is an RMSNorm, for which there are kernels."""
        return not self.mean

    def __call__(self, x: Float[Array, "*A E"]) -> Float[Array, "*A E"]:
        """The normed input, in its dtype."""
        y = x.astype(jnp.float32)
        if self.mean:
            y = y - y.mean(self.axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(self.axes, keepdims=True) + self.eps)
        y = y * self.weight[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)


def rms_normed(x: Float[Array, "*A E"], eps: float) -> Float[Array, "*A E"]:
    """The RMS norm over the last axis without a weight, in x's dtype."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)).astype(x.dtype)


class GatedNorm(nnx.Module):
    """RMSNorm over the numbers of a value, times silu of a gate.

    Args:
        config: epsilon, and the size of Y. Checkpoints hold the weight itself, whatever
            ``norms.unit_offset`` says of the other norms.
        dtype: dtype of the weight.
    """

    def __init__(self, config: ModelConfig, dtype: DTypeLike) -> None:
        self.eps = config.norm_eps
        self.weight = parameter("Y", config, dtype, "ones")

    def __call__(self, x: Float[Array, "*A Y"], gate: Float[Array, "*A Y"]) -> Float[Array, "*A Y"]:
        """The gated norm in x's dtype, to which the norm and its product are rounded too."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = (y.astype(x.dtype) * self.weight[...]).astype(jnp.float32)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
