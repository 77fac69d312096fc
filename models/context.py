"""What a model asks of whoever runs it and keeps its keys and values."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.gated_activation.xla import gated_silu
from pallas_kernels.kv_write.xla import split_qkv
from pallas_kernels.residual_norm.xla import add_rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Rotary:
    """Float32 tables that rotate the first 2R dims of H, one row per token.

    The attention factor of yarn is folded into both tables.
    """

    cos: Float[Array, "T R"]
    sin: Float[Array, "T R"]


class LayerContext(abc.ABC):
    """What a layer leaves to whoever runs it: keys and values, and the steps between its products.

    The model never sees a KV cache. A context must give ``attend_projected``; the other methods
    have plain forms, which a context with kernels for them replaces.
    """

    @abc.abstractmethod
    def attend_projected(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Float[Array, "X T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Attention output of T tokens at one layer, in the projections' dtype.

        ``qkv`` holds of each KV head its A - 2 queries, its key, its value, un-rotated, in parts if
        ``product`` gives them, and the ``bias`` still to be added; ``rotary`` is None where the
        model has no rotary embedding. N counts the queries of KV head 0 first, then those of KV
        head 1, and so on.
        """

    def add_rms_norm(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, the RMSNorm of that sum); the update in parts if ``product`` gives them."""
        return add_rms_norm(x, update, weight, eps)

    def gated_silu(self, h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
        """silu(h[:, 0]) * h[:, 1]."""
        return gated_silu(h)

    def gated_product(
        self, h: Float[Array, "T D"], w: Float[Array, "D 2 F"]
    ) -> Float[Array, "T F"]:
        """silu(h @ w[:, 0]) * (h @ w[:, 1])."""
        return self.gated_silu(jnp.einsum("TD,DAF->TAF", h, w))

    def product(
        self, h: Float[Array, "T D"], w: Float[Array, "D ..."]
    ) -> Float[Array, "T ..."] | Float[Array, "X T ..."]:
        """h @ w, or in parts, float32, that sum to it: for a reader that takes them."""
        return jnp.tensordot(h, w, 1)

    def normed_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
        w: Float[Array, "D ..."],
    ) -> tuple[Float[Array, "T D"], Float[Array, "T ..."] | Float[Array, "Y T ..."]]:
        """``add_rms_norm``, its norm given to ``product``: (x + update, the product)."""
        x, h = self.add_rms_norm(x, update, weight, eps)
        return x, self.product(h, w)

    def normed_gated_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
        w: Float[Array, "D 2 F"],
    ) -> tuple[Float[Array, "T D"], Float[Array, "T F"]]:
        """``add_rms_norm``, its norm given to ``gated_product``: (x + update, the product)."""
        x, h = self.add_rms_norm(x, update, weight, eps)
        return x, self.gated_product(h, w)

    def attended_product(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Float[Array, "X T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
        w: Float[Array, "E D"],
    ) -> Float[Array, "T D"] | Float[Array, "Y T D"]:
        """``attend_projected``, given to ``product``; E = N * H."""
        attended = self.attend_projected(layer, qkv, bias, rotary, spec)
        return self.product(attended.reshape(len(attended), -1), w)


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
