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
        self, x: Float[Array, "T D"], rotary: Rotary | None, context: LayerContext
    ) -> Float[Array, "T D"] | Float[Array, "X T D"]:
        bias = None if self.qkv_bias is None else self.qkv_bias[...]
        if self.q_norm is None or self.k_norm is None:
            qkv = context.product(x, self.qkv[...])
        else:
            qkv = jnp.einsum("TD,DKAH->TKAH", x, self.qkv[...])
            qkv, bias = qkv if bias is None else qkv + bias, None
            q, k = self.q_norm(qkv[:, :, :-2]), self.k_norm(qkv[:, :, -2:-1])
            qkv = jnp.concatenate([q, k, qkv[:, :, -1:]], axis=2)
        attended = context.attend_projected(self.layer, qkv, bias, rotary, self.spec)
        # As one matrix: over two axes, XLA on the CPU would copy the weights at every call.
        attended, output = attended.reshape(len(x), -1), self.output[...].reshape(-1, x.shape[-1])
        if self.output_bias is None:
            return context.product(attended, output)
        return attended @ output + self.output_bias[...]
