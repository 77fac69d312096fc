"""The attention context of the engine: KV in pages, attention by work list."""

import functools

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from models import Rotary
from pallas_kernels.attention.spec import AttentionSpec
from rjax.worker.backend import Backend
from rjax.worker.step_input import StepInput

_HEADS = PartitionSpec(None, "tensor", None)
_POOL = PartitionSpec(None, "tensor", None, None)
_WHOLE = PartitionSpec()


class PagedAttention:
    """Writes each layer's new K and V into its pages, then attends over them (an AttentionContext).

    Holds the pools of all layers, [P, K, S, H] each, and replaces them as layers write; lives for
    one trace of the step. On a mesh of several devices the kernels run under ``shard_map`` over K.
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
        self._plan = backend.prepare(step.plan, step.positions)
        self._backend = backend
        self._mesh = mesh

    def attend(
        self,
        layer: int,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        rotary: Rotary | None,
        spec: AttentionSpec,
    ) -> Float[Array, "T N H"]:
        """Rotate q and k, write k and v, attend; see ``models.AttentionContext``."""
        run = functools.partial(_attend, backend=self._backend, spec=spec)
        if self._mesh.size > 1:
            run = jax.shard_map(
                run,
                mesh=self._mesh,
                in_specs=(_HEADS, _HEADS, _HEADS, _POOL, _POOL, _WHOLE, _WHOLE, _WHOLE),
                out_specs=(_HEADS, _POOL, _POOL),
                check_vma=False,
            )
        out, self.k_pages[layer], self.v_pages[layer] = run(
            q, k, v, self.k_pages[layer], self.v_pages[layer], rotary, self._step, self._plan
        )
        return out


def _attend(
    q, k, v, k_pages, v_pages, rotary, step, plan, *, backend: Backend, spec: AttentionSpec
):
    if rotary is not None:
        q = backend.rotate(q, rotary.cos, rotary.sin)
        k = backend.rotate(k, rotary.cos, rotary.sin)
    k_pages, v_pages = backend.write_kv(k, v, k_pages, v_pages, step.kv_slots)
    out, _ = backend.paged_attention(
        q, k_pages, v_pages, step.page_table, step.positions, plan, spec
    )
    return out, k_pages, v_pages
