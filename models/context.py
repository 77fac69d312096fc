"""What a model asks of whoever keeps its keys and values."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float

from pallas_kernels.attention.spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """Float32 tables that rotate the first 2R dims of H, one row per token.

    The attention factor of yarn is folded into both tables.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


@runtime_checkable
class AttentionContext(Protocol):
    """Rotates, stores and attends for every layer; the model never sees a KV cache."""

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention output of T tokens at one layer, in q's dtype.

        q and k come un-rotated; ``rotary`` is None where the model has no rotary embedding. N
        counts the queries of KV head 0 first, then those of KV head 1, and so on.
        """
        ...
