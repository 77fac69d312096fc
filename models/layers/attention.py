"""The attention block around the attention, which is the context's."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.context import LayerContext, Rotary
from models.layers.norm import Norm
from models.layers.parameter import parameter
from pallas_kernels.attention.spec import AttentionSpec


class Attention(nnx.Module):
    """Projections of one layer; the attention itself is the context's.

    ``qkv`` is [D, K, G+2, H]: of each KV head its G queries, its key, its value. So cutting K over
    devices keeps every head with its keys.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        a = config.axis_sizes["G"] + 2
        self.layer = layer
        self.spec = AttentionSpec(config.head_dim**-0.5, config.sliding_windows[layer])
        self.qkv = parameter("D K A H", config, dtype, a=a)
        self.output = parameter("N H D", config, dtype)
        self.qkv_bias = parameter("K A H", config, dtype, "zeros", a) if config.qkv_bias else None
        self.output_bias = parameter("D", config, dtype, "zeros") if config.output_bias else None
        self.q_norm = Norm(config, dtype, "H") if config.qk_norm else None
        self.k_norm = Norm(config, dtype, "H") if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"] | None,
        norm: Norm,
        rotary: Rotary | None,
        context: LayerContext,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"] | Float[Array, "Y T D"]]:
        """(x + update, what attention to the norm of that adds to it)."""
        bias = None if self.qkv_bias is None else self.qkv_bias[...]
        if self.q_norm is None or self.k_norm is None:
            x, qkv = norm.add_product(x, update, self.qkv[...], context)
        else:
            x, h = norm.add(x, update, context)
            qkv = jnp.einsum("TD,DKAH->TKAH", h, self.qkv[...])
            qkv, bias = qkv if bias is None else qkv + bias, None
            q, k = self.q_norm(qkv[:, :, :-2]), self.k_norm(qkv[:, :, -2:-1])
            qkv = jnp.concatenate([q, k, qkv[:, :, -1:]], axis=2)
        # As one matrix: over two axes, XLA on the CPU would copy the weights at every call.
        output = self.output[...].reshape(-1, x.shape[-1])
        of_heads = self.layer, qkv, bias, rotary, self.spec
        if self.output_bias is None:
            return x, context.attended_product(*of_heads, output)
        attended = context.attend_projected(*of_heads).reshape(len(x), -1)
        return x, attended @ output + self.output_bias[...]
