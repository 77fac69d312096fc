"""The producer warpgroup: streams the queries and the KV of each work tile into shared memory.

Everything is TMA from GMEM to SMEM. Bytes of a work tile: the queries of its item, rounded up to
whole TMA boxes, and the K and V tokens of its heads (``kv_loads``).
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, EVICT_FIRST_MAX_ROWS
from rjax.pallas_kernels.attention.mosaic.cta import Cta, specialize
from rjax.pallas_kernels.attention.mosaic.kv_loads import KVLoads
from rjax.pallas_kernels.attention.mosaic.work_tile import WorkListShape, WorkTile

_REGISTERS = 40  # a thread; the consumers take the others


def run_producer(cta: Cta) -> None:
    """Load every work tile of the CTA."""
    plgpu.set_max_registers(_REGISTERS, action="decrease")
    cta.for_each_tile(functools.partial(_produce, cta))


def _produce(cta: Cta, tile: WorkTile, q_stage, kv_count) -> None:
    shape, gmem = cta.shape, cta.gmem
    plgpu.barrier_wait(cta.smem.q_empty.at[q_stage])
    for index, work in enumerate(shape.lists):
        if len(shape.lists) == 1:
            _load_queries(cta, tile, work, q_stage)
        else:
            load = functools.partial(_load_queries, cta, tile, work, q_stage)
            pl.when(tile.list_index == index)(load)

    def load_kv(cooperative: bool):
        # In steps of many rows, many cooperative work tiles read the same KV.
        evict_first = shape.T <= EVICT_FIRST_MAX_ROWS or not cooperative
        pools = (gmem.k_pages, gmem.v_pages)
        loads = KVLoads(tile, pools, gmem.page_table, cooperative, evict_first)
        loads.run(cta.pipeline, kv_count)

    specialize(tile.cooperative, shape.has_cooperative, shape.has_head_pairs, load_kv)


def _load_queries(cta: Cta, tile: WorkTile, work: WorkListShape, q_stage) -> None:
    """Start one copy for each consumer warpgroup: its half of the rows, or its KV head."""
    shape, smem = cta.shape, cta.smem
    box = shape.q_box(work)
    for w in range(CONSUMERS):
        row = tile.row_start + (w * work.warpgroup_rows if work.cooperative else 0)
        head = tile.head if work.cooperative else jnp.minimum(tile.head + w, shape.K - 1)
        buffer = q_stage * CONSUMERS + w
        target = smem.q_tma.at[buffer, pl.ds(0, box * shape.G)].reshape(box, shape.G, shape.H)
        source = cta.gmem.q.at[pl.ds(row, box), head]
        plgpu.copy_gmem_to_smem(source, target, smem.q_full.at[buffer])
