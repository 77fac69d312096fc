"""The operations of a step: KV in pages, attention by work list, kernels run on the mesh."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Float32, Int

from rjax.batch.page_groups import LayerPlace, PageGroups
from rjax.models import HeadNorms, HeadOptions, KvScales, Rotary
from rjax.models.sharding import TENSOR_AXIS
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.pallas_kernels.kernel import Kernel, Problem
from rjax.pallas_kernels.pending import Partial, UnmergedAttention
from rjax.pallas_kernels.residual.peers import Peers
from rjax.worker.backend import Backend
from rjax.worker.kernels import Choice
from rjax.worker.kernels.run import run_kernel
from rjax.worker.layer_kernels import Pools
from rjax.worker.operations import HEADS, UNMERGED, DispatchedOperations
from rjax.worker.step.input import GroupView, StepInput
from rjax.worker.value_specs import qkv_specs
from rjax.worker.write_and_attend import write_and_attend

_WHOLE = PartitionSpec()
_POOL = PartitionSpec(None, TENSOR_AXIS, None, None)


class PagedOperations(DispatchedOperations):
    """Writes each layer's new K and V into its pages, then attends over them.

    Holds the pools, [P, K, S, H] each, and replaces them as layers write; lives for one trace of
    the step. Layers of different page groups may share a pool, never a page; several layers of a
    group may share a page, each with a part of it. On a mesh every kernel runs under ``shard_map``:
    attention and the projections over K, N and F.

    Pools in float8_e4m3fn have the scales of the checkpoint, or 1: KV is divided by them, rounded
    to that type and clipped at 448.

    Args:
        k_pages, v_pages: one pool for each layer, or for each layer of the largest page group.
        step: the batch.
        groups: page groups of the layers.
        backend: attention and the dispatcher of the other kernels.
        mesh: the devices, with an axis ``tensor``.
        record, peers, early_weights: see `DispatchedOperations`.
        states: the states of each layer that has them in place of KV.
    """

    def __init__(
        self,
        k_pages: list[Float[Array, "P _ S _"]],
        v_pages: list[Float[Array, "P _ S _"]],
        step: StepInput,
        groups: PageGroups,
        backend: Backend,
        mesh: Mesh,
        record: Callable[[Choice], None] | None = None,
        peers: Peers | None = None,
        *,
        states: Sequence[LayerStates] = (),
        early_weights: bool = False,
    ) -> None:
        super().__init__(
            backend.dispatcher,
            backend.attention,
            mesh,
            record,
            peers,
            early_weights=early_weights,
        )
        self.k_pages = list(k_pages)
        self.v_pages = list(v_pages)
        self.states = list(states)
        self._step = step
        self._groups = groups
        self._views = step.views()
        self._parts: dict[LayerPlace, GroupView] = {}
        # Of each kind of page groups and each (N, K, H), as the attention backend takes them.
        self._plans: dict[tuple[int, tuple[int, int, int]], Any] = {}

    @property
    def _positions(self) -> Int[Array, " T"]:
        return jnp.asarray(self._step.positions)

    def _paged(self, layer: int) -> tuple[Pools, tuple[Any, Any, Any]]:
        place = self._groups.place(layer)
        # No kernel of a whole layer takes one that has a part of a page.
        view = self._views[place.group]
        rows = view.page_table, view.positions, view.kv_slots
        return (self.k_pages[place.pool], self.v_pages[place.pool]), rows

    def _keep(self, layer: int, pools: Pools) -> None:
        pool = self._groups.place(layer).pool
        self.k_pages[pool], self.v_pages[pool] = pools

    def _view(self, place: LayerPlace, page_size: int) -> GroupView:
        """The rows and pages of a layer: pages count the parts of all pages before, if it has a
        part of each."""
        view = self._views[place.group]
        if place.parts == 1:
            return view
        of_pool = place._replace(pool=0)
        if of_pool not in self._parts:
            slots = jnp.asarray(view.kv_slots)
            page = slots // page_size * place.parts + place.part
            self._parts[of_pool] = view._replace(
                kv_slots=jnp.where(slots < 0, slots, page * page_size + slots % page_size),
                page_table=jnp.asarray(view.page_table) * place.parts + place.part,
            )
        return self._parts[of_pool]

    def _plan(self, group: int, heads: tuple[int, int, int]) -> Any:
        """The attention plan of a page group for (N, K, H) of one device."""
        kinds = self._groups.kinds
        kind = next(i for i, kind in enumerate(kinds) if kind.first <= group < kind.stop)
        if (kind, heads) not in self._plans:
            found = self._attention.prepare(
                self._step.groups[kind].plan, self._step.positions, heads
            )
            self._plans[kind, heads] = found
        return self._plans[kind, heads]

    def attention(
        self,
        layer: int,
        qkv: Float[Array, "T K A H"] | Partial,
        rotary: Rotary | None,
        spec: AttentionSpec,
        kv_scales: KvScales | None = None,
        heads: HeadOptions | None = None,
        norms: HeadNorms | None = None,
    ) -> Float[Array, "T N H"] | UnmergedAttention:
        """Norm and rotate q and k, write k and v, attend; see ``rjax.models.Operations``."""
        T, K, A, H = qkv.shape
        place = self._groups.place(layer)
        pool = place.pool
        write, problem, qkv, weights = self._write_kernel(
            qkv, rotary, norms, self.k_pages[pool].dtype
        )
        unmerged = self._leaves_unmerged(T, heads)
        attend = functools.partial(
            write_and_attend,
            write=write,
            problem=problem,
            backend=self._attention,
            spec=spec,
            unmerged=unmerged,
        )
        if self._mesh.size > 1:
            attend = jax.shard_map(
                attend,
                mesh=self._mesh,
                in_specs=(
                    *(qkv_specs(qkv), _POOL, _POOL, _WHOLE, _WHOLE, PartitionSpec(TENSOR_AXIS)),
                    *(_WHOLE, _WHOLE, _WHOLE),
                ),
                out_specs=(UNMERGED if unmerged else HEADS, _POOL, _POOL),
                check_vma=False,
            )
        out, self.k_pages[pool], self.v_pages[pool] = attend(
            qkv,
            self.k_pages[pool],
            self.v_pages[pool],
            rotary,
            kv_scales,
            heads,
            weights,
            self._view(place, self.k_pages[pool].shape[2]),
            self._plan(place.group, (K * (A - 2) // self._mesh.size, K // self._mesh.size, H)),
        )
        return out

    def gated_delta(
        self,
        layer: int,
        mixed: Float[Array, "T K W"],
        weight: Float[Array, "K X W"],
        decay: Float32[Array, "T K G"],
        beta: Float32[Array, "T K G"],
        key_dim: int,
    ) -> Float[Array, "T K G Y"]:
        """Convolve, and go through the layer's states; see ``rjax.models.Operations``."""
        _, number = self._groups.layers[layer]
        rows = self._step.states
        assert rows is not None
        found, states = self._through_states(
            mixed, weight, decay, beta, key_dim, self.states[number], rows
        )
        self.states[number] = states
        return found

    def _merged(self, h: Float[Array, "T ..."] | UnmergedAttention) -> Float[Array, "T ..."]:
        if not isinstance(h, UnmergedAttention):
            return h
        merge = self._attention.merge
        assert merge is not None
        return merge(h)

    def _run(
        self,
        kernel: Kernel,
        problem: Problem,
        operands: tuple[Any, ...],
        specs: tuple[Any, ...],
        of_result: Callable[[Any], Any],
    ) -> Any:
        return run_kernel(kernel, problem, operands, specs, of_result, self._mesh)
