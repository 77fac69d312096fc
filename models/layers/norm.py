"""Norms over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.parameter import parameter


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with bias if ``config.layer_norm``; over axis D or H."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, letter: str = "D") -> None:
        self.eps = config.norm_eps
        self.weight = parameter(letter, config, dtype, "ones")
        self.bias = parameter(letter, config, dtype, "zeros") if config.layer_norm else None

    def __call__(self, x: Float[Array, "*A E"]) -> Float[Array, "*A E"]:
        """The normed input, in its dtype."""
        y = x.astype(jnp.float32)
        if self.bias is not None:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * self.weight[...].astype(jnp.float32)
        if self.bias is not None:
            y = y + self.bias[...].astype(jnp.float32)
        return y.astype(x.dtype)
