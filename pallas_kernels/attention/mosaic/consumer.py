"""A consumer warpgroup: attention of its part of each work tile, and its results.

Single-row items run swap-AB decode where it applies. The others run the multi-row path here: stage
the queries for wgmma, run the mainloop, normalize, write. In a cooperative work tile the first
warpgroup takes the first half of the item's rows and the second one the rest; in a head pair each
takes its KV head. Bytes: reads 2 * H a matrix row of queries from SMEM and writes them once in
wgmma's layout; writes 2 * H + 4 a live matrix row to GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.alibi import gather_heads
from rjax.pallas_kernels.attention.mosaic.config import WGMMA_M
from rjax.pallas_kernels.attention.mosaic.cta import ConsumerTile, Cta, specialize
from rjax.pallas_kernels.attention.mosaic.epilogue import (
    OutputRows,
    gather_rows,
    store_lse,
    store_rows,
)
from rjax.pallas_kernels.attention.mosaic.fp8 import Fp8Tiles, split_queries
from rjax.pallas_kernels.attention.mosaic.fragment_io import load_tile
from rjax.pallas_kernels.attention.mosaic.mainloop import Mainloop, MainloopInputs
from rjax.pallas_kernels.attention.mosaic.softmax import normalize
from rjax.pallas_kernels.attention.mosaic.swap_ab_decode import run_swap_ab_decode
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import WorkTile

_REGISTERS = 232  # a thread


def run_consumer(cta: Cta) -> None:
    """Compute one warpgroup's part of every work tile of the CTA."""
    plgpu.set_max_registers(_REGISTERS, action="increase")
    for stage in range(cta.cfg.q_stages):
        plgpu.barrier_arrive(cta.smem.q_empty.at[stage])
    for stage in range(cta.cfg.kv_stages):
        cta.pipeline.consumer_release(stage)
    cta.for_each_tile(functools.partial(_consume, cta))


def _consume(cta: Cta, tile: WorkTile, q_stage, kv_count) -> None:
    consumer = ConsumerTile.of(cta, tile, q_stage, kv_count)
    plgpu.barrier_wait(cta.smem.q_full.at[consumer.q_buffer])
    uses_swap_ab = cta.shape.uses_swap_ab
    swap_ab = jnp.bool_(False)
    for index, uses in enumerate(uses_swap_ab):
        swap_ab = swap_ab | (tile.list_index == index) if uses else swap_ab

    def run(swap_ab: bool) -> None:
        run_swap_ab_decode(consumer) if swap_ab else _run_multi_row(consumer)

    specialize(swap_ab, any(uses_swap_ab), not all(uses_swap_ab), run)


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """A warpgroup's share of a work tile; int32 scalars.

    Attributes:
        shift: its first row in the item.
        head: its KV head, which may be K where a head pair has no second one.
        live: its rows, 0 if the head does not exist.
        loaded: the same, but at least 1: without live rows it computes the last row and drops it.
        first: the query row of its first matrix row.
    """

    shift: Any
    head: Any
    live: Any
    loaded: Any
    first: Any

    @classmethod
    def of(cls, cta: Cta, tile: WorkTile) -> "_Rows":
        shift = jnp.where(tile.cooperative, cta.wg * tile.warpgroup_rows, 0)
        head = jnp.where(tile.cooperative, tile.head, tile.head + cta.wg)
        share = jnp.clip(tile.num_rows - shift, 0, tile.warpgroup_rows)
        live = jnp.where(tile.cooperative, share, tile.num_rows)
        live = jnp.where(head < cta.shape.K, live, 0)
        loaded = jnp.maximum(live, 1)
        first = tile.row_start + jnp.minimum(shift, tile.num_rows - 1)
        return cls(shift, head, live, loaded, first)


def _run_multi_row(consumer: ConsumerTile) -> None:
    """Compute 64 matrix rows of a work tile and write their results."""
    cta, tile = consumer.cta, consumer.tile
    shape, gmem = cta.shape, cta.gmem
    G = shape.G
    rows = _Rows.of(cta, tile)
    positions = gather_rows(gmem.positions, rows.first, rows.loaded, G)
    entry = gather_rows(gmem.destinations, tile.result_slot + rows.shift, rows.loaded, G)
    fp8 = _stage_queries(consumer, rows)
    slopes = None
    if gmem.alibi_slopes is not None:
        slopes = gather_heads(gmem.alibi_slopes, rows.head * G, G)
    inputs = MainloopInputs(positions, slopes, fp8)

    # Only the mainloop is specialized: instruction fetches are cold in a whole step.
    def run(cooperative: bool):
        return Mainloop.of(consumer, inputs, cooperative).run()

    state = specialize(tile.cooperative, shape.has_cooperative, shape.has_multi_row_head_pairs, run)
    target = OutputRows(entry, tile.row_start + rows.shift, rows.head * G, rows.live)
    value, lse = normalize(state.acc, state.row_max, state.row_sum.sum(axis=1), consumer.v_scale, 0)
    store_rows(gmem.results, value.astype(shape.q_dtype), target, G)
    store_lse(gmem.results, lse, target, G)


def _stage_queries(consumer: ConsumerTile, rows: _Rows) -> Fp8Tiles | None:
    """Rewrite the query buffer in place, from rows to wgmma's layout."""
    cta, shape = consumer.cta, consumer.cta.shape
    fp8 = None
    if shape.has_fp8_kv:
        operands, q_scale = split_queries(consumer.q_rows)
        fp8 = Fp8Tiles.of(consumer, q_scale)
    else:
        tile = load_tile(consumer.q_rows, rows.loaded * shape.G, shape.H, shape.q_dtype)
        operands = (tile,)
    plgpu.commit_smem()
    for n, operand in enumerate(operands):
        cta.smem.q_wgmma.at[consumer.q_buffer, n, pl.ds(0, WGMMA_M)][...] = operand
    plgpu.commit_smem()
    return fp8
