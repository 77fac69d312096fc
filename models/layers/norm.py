"""Norms over the last axis, computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.context import LayerContext
from models.layers.parameter import parameter
from pallas_kernels.split_product.xla import sum_parts


class Norm(nnx.Module):
    """RMSNorm, or LayerNorm with a bias where the config says so; over axis D or H."""

    def __init__(self, config: ModelConfig, dtype: DTypeLike, letter: str = "D") -> None:
        self.eps = config.norm_eps
        self.weight = parameter(letter, config, dtype, "ones")
        self.bias = parameter(letter, config, dtype, "zeros") if config.layer_norm else None

    def add(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"] | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, the norm of that sum); the update as ``context.product`` gives it, or None
        where there is none."""
        if update is None:
            return x, self(x)
        if self.bias is None:
            return context.add_rms_norm(x, update, self.weight[...], self.eps)
        x = x + sum_parts(update, x, 2)
        return x, self(x)

    def add_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"] | None,
        w: Float[Array, "D ..."],
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T ..."] | Float[Array, "Y T ..."]]:
        """``add``, its norm given to ``context.product``."""
        if update is not None and self.bias is None:
            return context.normed_product(x, update, self.weight[...], self.eps, w)
        x, h = self.add(x, update, context)
        return x, context.product(h, w)

    def add_gated_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"] | None,
        w: Float[Array, "D 2 F"],
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T F"]]:
        """``add``, its norm given to ``context.gated_product``."""
        if update is not None and self.bias is None:
            return context.normed_gated_product(x, update, self.weight[...], self.eps, w)
        x, h = self.add(x, update, context)
        return x, context.gated_product(h, w)

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
