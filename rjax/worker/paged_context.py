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
        run = functools.partial(_attend, backend=self._backend, spec=spec)
        if self._mesh.size > 1:
            run = jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(_PROJECTIONS, _BIAS, _POOL, _POOL, _WHOLE, _WHOLE, _WHOLE),
                out_specs=(_HEADS, _POOL, _POOL),
                check_vma=False,
            )
        out, self.k_pages[layer], self.v_pages[layer] = run(
            *self._of_layer(layer, qkv, bias, rotary)
        )
        return out

    def attended_product(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Float[Array, "X T K A H"],
        bias: Float[Array, "K A H"] | None,
        rotary: Rotary | None,
        spec: AttentionSpec,
        w: Float[Array, "E D"],
    ) -> Float[Array, "T D"] | Float[Array, "Y T D"]:
        """``attend_projected``, given to ``product``; of one row, its relay fusion is in that."""
        if not self._has_one_row(qkv.shape[-4]):
            return super().attended_product(layer, qkv, bias, rotary, spec, w)
        out, self.k_pages[layer], self.v_pages[layer] = _attended_product(
            *self._of_layer(layer, qkv, bias, rotary), w, backend=self._backend, spec=spec
        )
        return out

    def _of_layer(self, layer: int, qkv, bias, rotary):
        """What attention of a layer reads."""
        K, A = qkv.shape[-3:-1]
        if self._plan is None:  # every layer has the same heads
            heads = (K * (A - 2) // self._mesh.size, K // self._mesh.size)
            self._plan = self._backend.prepare(self._step.plan, self._step.positions, heads)
        if self._fp8 and qkv.ndim == 5:  # whoever sums parts rounds them to the dtype of the pages
            assert self._dtype is not None
            qkv = qkv.sum(0).astype(self._dtype)
        pages = self.k_pages[layer], self.v_pages[layer]
        return qkv, bias, *pages, rotary, self._step, self._plan

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
        if not self._streams(len(h)):
            return super().product(h, w)
        self._dtype = h.dtype
        return _split_product(h, w, backend=self._backend)

    def gated_product(
        self, h: Float[Array, "T D"], w: Float[Array, "D 2 F"]
    ) -> Float[Array, "T F"]:
        """silu(h @ w[:, 0]) * (h @ w[:, 1])."""
        if self._backend.gated_product is None or not self._streams(len(h)):
            return super().gated_product(h, w)
        return _gated_product(h, w, backend=self._backend)

    def normed_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
        w: Float[Array, "D ..."],
    ) -> tuple[Float[Array, "T D"], Float[Array, "T ..."] | Float[Array, "Y T ..."]]:
        """(x + update, ``product`` of its norm); of one row in one kernel."""
        if not self._has_one_row(len(x)):
            return super().normed_product(x, update, weight, eps, w)
        self._dtype = x.dtype
        return _normed_product(x, update, weight, w, backend=self._backend, eps=eps)

    def normed_gated_product(
        self,
        x: Float[Array, "T D"],
        update: Float[Array, "T D"] | Float[Array, "X T D"],
        weight: Float[Array, " D"],
        eps: float,
        w: Float[Array, "D 2 F"],
    ) -> tuple[Float[Array, "T D"], Float[Array, "T F"]]:
        """(x + update, ``gated_product`` of its norm); of one row in one kernel."""
        if not self._has_one_row(len(x)):
            return super().normed_gated_product(x, update, weight, eps, w)
        return _normed_gated_product(x, update, weight, w, backend=self._backend, eps=eps)

    def _streams(self, rows: int) -> bool:
        return self._mesh.size == 1 and self._backend.streams_products(rows)

    def _has_one_row(self, rows: int) -> bool:
        return rows == 1 and self._backend.one_row is not None and self._streams(rows)


# Each is jitted by itself, so that it is traced, lowered and (its kernels) compiled once for all
# layers and not once for each; XLA puts it back into the step it stands in.


@functools.partial(jax.jit, static_argnames=("backend", "spec"))
def _attend(qkv, bias, k_pages, v_pages, rotary, step, plan, *, backend: Backend, spec):
    given, scales = _written(qkv, bias, k_pages, v_pages, rotary, step, backend)
    out, _ = backend.paged_attention(*given, step.page_table, step.positions, plan, spec, **scales)
    return out, *given[1:]


@functools.partial(jax.jit, static_argnames=("backend", "spec"))
def _attended_product(
    qkv, bias, k_pages, v_pages, rotary, step, plan, w, *, backend: Backend, spec
):
    assert backend.one_row is not None
    given, scales = _written(qkv, bias, k_pages, v_pages, rotary, step, backend)
    unmerged = backend.one_row.unmerged_attention(
        *given, step.page_table, step.positions, plan, spec, **scales
    )
    return backend.one_row.merged_product(*unmerged, w), *given[1:]


def _written(qkv, bias, k_pages, v_pages, rotary, step, backend: Backend):
    """(rotated queries and the pages with the step's keys and values), and the pages' scales."""
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    scales = {}
    if k_pages.dtype == jnp.float8_e4m3fn:
        ones = jnp.ones(k_pages.shape[1], jnp.float32)
        scales = {"k_scales": ones, "v_scales": ones}
    written = backend.rotate_and_write(
        qkv, bias, cos, sin, k_pages, v_pages, step.kv_slots, **scales
    )
    return written, scales


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


@functools.partial(jax.jit, static_argnames=("backend", "eps"))
def _normed_product(x, update, weight, w, *, backend: Backend, eps: float):
    assert backend.one_row is not None
    flat = w.reshape(w.shape[0], -1)
    total, parts = backend.one_row.normed_product(x, update, weight, eps, flat)
    return total, parts.reshape(*parts.shape[:2], *w.shape[1:])


@functools.partial(jax.jit, static_argnames=("backend", "eps"))
def _normed_gated_product(x, update, weight, w, *, backend: Backend, eps: float):
    assert backend.one_row is not None
    return backend.one_row.normed_gated_product(x, update, weight, eps, w)
