"""Attention of a shared prefix and its branches, for training and for scoring without a server."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from rjax.models.operations import HeadsOperations
from rjax.models.rope import Rotary
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.rope_and_cache.base import rotate

Implementation = Literal["xla", "cudnn"]


def branch_mask(
    lengths: Int[Array, " B"], segments: Int[Array, "B Q"], P: int
) -> Bool[Array, "B 1 Q S"]:
    """The mask of branch tokens: the real prefix (the first P keys), then causal in their branch.

    Padding attends to padding, so that no row is empty.
    """
    B, Q = segments.shape
    prefix = jnp.broadcast_to(jnp.arange(P) < lengths[:, None, None], (B, Q, P))
    own = segments[:, :, None] == segments[:, None, :]
    own &= jnp.arange(Q)[:, None] >= jnp.arange(Q)
    return jnp.concatenate([prefix, own], -1)[:, None]


def _rotated(x: Float[Array, "T A H"], rotary: Rotary | None) -> Float[Array, "T A H"]:
    return x if rotary is None else rotate(x, rotary.cos, rotary.sin)


def _check(spec: AttentionSpec) -> None:
    if spec.sliding_window is not None:
        raise ValueError("the bundled model has no sliding window; this attention knows none")
    if spec.soft_cap is not None:
        raise ValueError("the bundled model has no soft cap; this attention knows none")


@dataclasses.dataclass(frozen=True, slots=True)
class TreeAttention(HeadsOperations):
    """B examples at once, each with P prefix tokens, then Q branch tokens.

    A call has T = B * (P + Q) tokens, one example after another.
    """

    prefix: int
    mask: Bool[Array, "B 1 Q S"]
    implementation: Implementation = "xla"

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Causal attention of the prefixes on themselves, masked attention of the branches."""
        del layer
        _check(spec)
        T, N, H = q.shape
        B, P = self.mask.shape[0], self.prefix
        q, k, v = (
            x.reshape(B, T // B, -1, H) for x in (_rotated(q, rotary), _rotated(k, rotary), v)
        )
        prefix = jax.nn.dot_product_attention(
            q[:, :P],
            k[:, :P],
            v[:, :P],
            scale=spec.scale,
            is_causal=True,
            implementation=self.implementation,
        )
        branches = jax.nn.dot_product_attention(
            q[:, P:], k, v, mask=self.mask, scale=spec.scale, implementation=self.implementation
        )
        return jnp.concatenate([prefix, branches], 1).reshape(T, N, H)


class PrefixAttention(HeadsOperations):
    """Causal attention of B prefixes that keeps each layer's rotated keys, and values."""

    def __init__(self, B: int, implementation: Implementation = "xla") -> None:
        self.B = B
        self.implementation: Implementation = implementation
        self.keys: list[Float[Array, "B P K H"]] = []
        self.values: list[Float[Array, "B P K H"]] = []

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention within each prefix."""
        _check(spec)
        T, N, H = q.shape
        q, k, v = (
            x.reshape(self.B, T // self.B, -1, H)
            for x in (_rotated(q, rotary), _rotated(k, rotary), v)
        )
        assert layer == len(self.keys)
        self.keys.append(k)
        self.values.append(v)
        out = jax.nn.dot_product_attention(
            q, k, v, scale=spec.scale, is_causal=True, implementation=self.implementation
        )
        return out.reshape(T, N, H)


@dataclasses.dataclass(frozen=True, slots=True)
class BranchAttention(HeadsOperations):
    """Attention of the branches alone, over prefixes that `PrefixAttention` has kept."""

    keys: list[Float[Array, "B P K H"]]
    values: list[Float[Array, "B P K H"]]
    mask: Bool[Array, "B 1 Q S"]
    implementation: Implementation = "xla"

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Masked attention over prefix and branches."""
        _check(spec)
        T, N, H = q.shape
        B = self.mask.shape[0]
        q, k, v = (
            x.reshape(B, T // B, -1, H) for x in (_rotated(q, rotary), _rotated(k, rotary), v)
        )
        out = jax.nn.dot_product_attention(
            q,
            jnp.concatenate([self.keys[layer], k], 1),
            jnp.concatenate([self.values[layer], v], 1),
            mask=self.mask,
            scale=spec.scale,
            implementation=self.implementation,
        )
        return out.reshape(T, N, H)
