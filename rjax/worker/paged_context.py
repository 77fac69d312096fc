"""The engine's layer context: KV in pages, attention by work list, the backend's kernels."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from models import LayerContext, Rotary
from pallas_kernels.attention.spec import AttentionSpec
from rjax.worker.backend import Backend
from rjax.worker.step_input import StepInput

_PROJECTIONS = PartitionSpec(None, "tensor", None, None)
_BIAS = PartitionSpec("tensor", None, None)
_HEADS = PartitionSpec(None, "tensor", None)
_POOL = PartitionSpec(None, "tensor", None, None)
_WHOLE = PartitionSpec()


class PagedContext(LayerContext):
    """Writes each layer's new K and V into its pages, then attends over them.

    Holds the pools of all layers, [P, K, S, H] each, and replaces them as layers write; lives for
    one trace of the step. On a mesh of several devices attention runs under ``shard_map`` over K,
    and the steps between the products in plain JAX, where XLA splits them with the products.

    Pools in float8_e4m3fn have scales of 1: what is written is rounded to that type, and what is
    beyond 448 is clipped to it.
    """

    def __init__(
        self,
        k_pages: list[Float[Array, "P K S H"]],
        v_pages: list[Float[Array, "P K S H"]],
        step: StepInput,
        backend: Backend,
        mesh: Mesh,
    ) -> None:
        self.k_pages = list(k_pages)
        self.v_pages = list(v_pages)
        self._step = step
        self._plan = None
        self._fp8 = k_pages[0].dtype == jnp.float8_e4m3fn
        self._dtype = None  # of what the last product in parts is meant in
        self._backend = backend
        self._mesh = mesh

    def attend_projected(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Float[Array, "X T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Rotate q and k, write k and v, attend; see ``models.LayerContext``."""
        devices = self._mesh.size
        K, A = qkv.shape[-3:-1]
        if self._plan is None:  # every layer has the same heads
            heads = (K * (A - 2) // devices, K // devices)
            self._plan = self._backend.prepare(self._step.plan, self._step.positions, heads)
        if self._fp8 and qkv.ndim == 5:  # whoever sums parts rounds them to the dtype of the pages
            assert self._dtype is not None
            qkv = qkv.sum(0).astype(self._dtype)
        run = functools.partial(_attend, backend=self._backend, spec=spec)
        if devices > 1:
            run = jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(_PROJECTIONS, _BIAS, _POOL, _POOL, _WHOLE, _WHOLE, _WHOLE),
                out_specs=(_HEADS, _POOL, _POOL),
                check_vma=False,
            )
        out, self.k_pages[layer], self.v_pages[layer] = run(
            qkv,
            bias,
            self.k_pages[layer],
            self.v_pages[layer],
            rotary,
            self._step,
            self._plan,
        )
        return out

    def add_rms_norm(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """(x + update, the RMSNorm of that sum)."""
        if self._mesh.size > 1:
            return super().add_rms_norm(x, update, weight, eps)
        return _add_rms_norm(x, update, weight, backend=self._backend, eps=eps)

    def gated_silu(self, h: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
        """silu(h[:, 0]) * h[:, 1]."""
        if self._mesh.size > 1:
            return super().gated_silu(h)
        return _gated_silu(h, backend=self._backend)

    def product(
        self, h: Float[Array, "T D"], w: Float[Array, "D ..."]
    ) -> Float[Array, "T ..."] | Float[Array, "X T ..."]:
        """h @ w, or in parts, float32, that sum to it."""
        if not self._streams(h):
            return super().product(h, w)
        self._dtype = h.dtype
        return _split_product(h, w, backend=self._backend)

    def gated_product(
        self, h: Float[Array, "T D"], w: Float[Array, "D 2 F"]
    ) -> Float[Array, "T F"]:
        """silu(h @ w[:, 0]) * (h @ w[:, 1])."""
        if self._backend.gated_product is None or not self._streams(h):
            return super().gated_product(h, w)
        return _gated_product(h, w, backend=self._backend)

    def _streams(self, h: Float[Array, "T D"]) -> bool:
        return self._mesh.size == 1 and self._backend.streams_products(h.shape[0])


# Each is jitted by itself, so that it is traced, lowered and (its kernels) compiled once for all
# layers and not once for each; XLA puts it back into the step it stands in.


@functools.partial(jax.jit, static_argnames=("backend", "spec"))
def _attend(qkv, bias, k_pages, v_pages, rotary, step, plan, *, backend: Backend, spec):
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    scales = {}
    if k_pages.dtype == jnp.float8_e4m3fn:
        ones = jnp.ones(k_pages.shape[1], jnp.float32)
        scales = {"k_scales": ones, "v_scales": ones}
    q, k_pages, v_pages = backend.rotate_and_write(
        qkv, bias, cos, sin, k_pages, v_pages, step.kv_slots, **scales
    )
    out, _ = backend.paged_attention(
        q, k_pages, v_pages, step.page_table, step.positions, plan, spec, **scales
    )
    return out, k_pages, v_pages


@functools.partial(jax.jit, static_argnames=("backend", "eps"))
def _add_rms_norm(x, update, weight, *, backend: Backend, eps: float):
    return backend.add_rms_norm(x, update, weight, eps)


@functools.partial(jax.jit, static_argnames=("backend",))
def _gated_silu(h, *, backend: Backend):
    return backend.gated_silu(h)


@functools.partial(jax.jit, static_argnames=("backend",))
def _gated_product(h, w, *, backend: Backend):
    assert backend.gated_product is not None
    return backend.gated_product(h, w)


@functools.partial(jax.jit, static_argnames=("backend",))
def _split_product(h, w, *, backend: Backend):
    assert backend.split_product is not None
    parts = backend.split_product(h, w.reshape(w.shape[0], -1))
    return parts.reshape(*parts.shape[:2], *w.shape[1:])
