"""What a model asks of whoever runs it and keeps its keys and values."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.gated_activation.xla import gated_silu
from pallas_kernels.kv_write.xla import split_qkv
from pallas_kernels.products.xla import row_scale
from pallas_kernels.residual_norm.xla import add_rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """Float32 tables that rotate the first 2R dims of H, one row per token.

    The attention factor of yarn is folded into both tables.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Normed:
    """Normed rows, or rows that a product has still to divide by their root mean square.

    Attributes:
        values: the normed rows; with ``squares``, rows that have only met their norm's weight.
        squares: parts of the sum of each row's squares, before its weight.
        eps: added to their mean.
    """

    values: Float[Array, "T D"]
    squares: Float32[Array, "T P"] | None = None
    eps: float = dataclasses.field(default=0.0, metadata={"static": True})

    def divided(self) -> Float[Array, "T D"]:
        """The normed rows."""
        if self.squares is None:
            return self.values
        scale = row_scale(self.squares, self.eps, self.values.shape[1])
        return (self.values.astype(jnp.float32) * scale).astype(self.values.dtype)


class LayerContext(abc.ABC):
    """What a layer leaves to whoever runs it: keys and values, its products, and what is between.

    The model never sees a KV cache. A context must give ``attend_projected``; the other methods
    have plain forms, which a context with kernels for them replaces.
    """

    @abc.abstractmethod
    def attend_projected(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention output of T tokens at one layer, in the projections' dtype.

        ``qkv`` holds of each KV head its A - 2 queries, its key, its value, un-rotated, and the
        ``bias`` still to be added; ``rotary`` is None where the model has no rotary embedding. N
        counts the queries of KV head 0 first, then those of KV head 1, and so on.
        """

    def add_rms_norm(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"],
        weight: Float[Array, " D"],
        eps: float,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, the RMSNorm of that sum)."""
        return add_rms_norm(x, update, weight, eps)

    def gated_silu(self, h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
        """silu(h[:, 0]) * h[:, 1]."""
        return gated_silu(h)

    def product(self, h: Normed, w: Float[Array, "D ..."]) -> Float[Array, "T ..."]:
        """Normed rows times weights."""
        return jnp.tensordot(h.divided(), w, 1)

    def gated_product(self, h: Normed, w: Float[Array, "D 2 F"]) -> Float[Array, "T F"]:
        """silu(h @ w[:, 0]) * (h @ w[:, 1])."""
        return self.gated_silu(self.product(h, w))

    def add_product(
        self,
        x: Float[Array, "T D"],
        h: Float[Array, "T F"],
        w: Float[Array, "F D"],
        weight: Float[Array, " D"],
        eps: float,
    ) -> tuple[Float[Array, "T D"], Normed]:
        """(x + h @ w, the RMSNorm of that sum)."""
        x, values = self.add_rms_norm(x, h @ w, weight, eps)
        return x, Normed(values)


class HeadsContext(LayerContext):
    """A context that takes queries, keys and values apart."""

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention output of T tokens at one layer, in q's dtype; q and k come un-rotated."""

    def attend_projected(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """``attend`` from the projections."""
        q, k, v = split_qkv(qkv if bias is None else qkv + bias)
        return self.attend(layer, q, k, v, rotary, spec)
