"""The attention block of models with multi-head latent attention, in its expanded form."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.models.config import ModelConfig
from rjax.models.layers.attention import attention_spec
from rjax.models.layers.linear import Linear
from rjax.models.layers.norm import Norm
from rjax.models.operations import Operations, Residual
from rjax.models.rope import Rotary, halves_of_pairs
from rjax.pallas_kernels.pending import UnmergedAttention, reduced


class LatentAttention(nnx.Module):
    """The attention block of one layer: every head's key and value are made of a shared latent.

    Each head has a KV head of its own (K = N), which is cached like any other model's, so that
    attention, shared prefixes and meshes are theirs. In the cache a query or key has its rotated
    dims first, and queries, keys and values are padded with zeros to H; weights stay as checkpoints
    have them, because blocks of scales may cross the dims of a head.

    Every device of a mesh computes the latents; heads are divided.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: DTypeLike) -> None:
        latent = config.latent
        assert latent is not None and config.num_heads == config.num_kv_heads
        self.layer, self.latent = layer, latent
        self.spec = attention_spec(config, layer)
        rope = config.rope_of(layer)
        self.interleaved = rope is not None and rope.interleaved
        path = f"layers.{layer}.attention"

        def linear(name: str, inputs: str, outputs: str, *, bias: bool = False) -> Linear:
            scheme = config.scheme_of(f"{path}.{name}")
            return Linear(inputs, outputs, config, dtype, scheme=scheme, bias=bias)

        low_rank = latent.q_rank is not None
        self.q_a = linear("q_a", "D", "Q", bias=latent.bias) if low_rank else None
        self.q_norm = Norm(config, dtype, "Q", eps=latent.norm_eps) if low_rank else None
        self.q = linear("q", "Q" if low_rank else "D", "N W")
        self.kv_a = linear("kv_a", "D", "Y", bias=latent.bias)
        self.kv_norm = Norm(config, dtype, "Z", eps=latent.norm_eps)
        self.kv_b = linear("kv_b", "Z", "N E")
        self.output = linear("output", "N O", "D", bias=config.output_bias)

    @property
    def input_projections(self) -> tuple[Linear, ...]:
        """The projections before attention, in the order of their calls."""
        return *(() if self.q_a is None else (self.q_a,)), self.q, self.kv_a, self.kv_b

    def __call__(
        self,
        residual: Residual,
        norm: Norm | None,
        rotary: Rotary | None,
        operations: Operations,
    ) -> Residual:
        """The residual stream with the attention output as update."""
        residual, h = operations.norm(residual, norm)
        queries = h
        if self.q_a is not None and self.q_norm is not None:
            queries = self.q_norm(reduced(operations.linear(self.q_a, h)))
        q = reduced(operations.linear(self.q, queries))
        latent = reduced(operations.linear(self.kv_a, h))
        rank = self.latent.kv_rank
        kv = reduced(operations.linear(self.kv_b, self.kv_norm(latent[:, :rank])))
        qkv = self._heads(q, latent[:, rank:], kv)
        attended = operations.attention(self.layer, qkv, rotary, self.spec)
        values = _first_dims(attended, self.latent.value_dim)
        return residual.plus(operations.linear(self.output, values))

    def _heads(
        self, q: Float[Array, "T N W"], shared: Float[Array, "T _"], kv: Float[Array, "T N E"]
    ) -> Float[Array, "T N 3 H"]:
        """A query, a key and a value of each head, from the shared key and the expanded latent."""
        nope, rope = self.latent.nope_dim, self.latent.rope_dim
        q_rope = q[:, :, nope:]
        if self.interleaved:
            q_rope, shared = halves_of_pairs(q_rope, rope), halves_of_pairs(shared, rope)
        k_rope = jnp.broadcast_to(shared[:, None], q_rope.shape)
        parts = (
            jnp.concatenate([q_rope, q[:, :, :nope]], axis=-1),
            jnp.concatenate([k_rope, kv[:, :, :nope]], axis=-1),
            kv[:, :, nope:],
        )
        H = self.latent.head_dim
        return jnp.stack([_padded(part, H) for part in parts], axis=2)


def _padded(heads: Float[Array, "T N _"], size: int) -> Float[Array, "T N H"]:
    """The heads with zeros behind their dims."""
    missing = size - heads.shape[-1]
    return heads if missing == 0 else jnp.pad(heads, ((0, 0), (0, 0), (0, missing)))


def _first_dims(
    attended: Float[Array, "T N H"] | UnmergedAttention, dims: int
) -> Float[Array, "T N O"] | UnmergedAttention:
    """The dims of the values, without the padding."""
    if isinstance(attended, UnmergedAttention):
        return attended.first_dims(dims)
    return attended[:, :, :dims]
