"""The attention kernel for Hopper in Pallas Mosaic GPU: FlashAttention over paged KV by work list.

Persistent CTAs of three warpgroups: a producer that loads by TMA (``producer``) and two consumers
that compute with wgmma (``mainloop``; ``swap_ab`` for items of one row). A CTA takes work tiles
from a static schedule (``tile_scheduler``). A work tile is an item of a work list on one KV head or
on two; heads of more than 256 dims are split over both consumers. The producer streams K and V
through a pipeline in shared memory (``cta``) and runs ahead over the ends of work tiles; scores,
softmax and output stay in registers. Bytes from GMEM: K and V of each item once, 2 * tokens * K * H
* itemsize, and its queries once. Bytes to GMEM: the results of its live rows once. Reads of KV are
marked evict-first in L2, except those of cooperative work tiles in steps of many rows, where many
work tiles read the same KV.
Method: FlashAttention-3 (Shah et al., 2024), with swap-AB for decode.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KernelConfig, swap_ab_columns
from rjax.pallas_kernels.attention.mosaic.cta import (
    ConsumerTile,
    Cta,
    GlobalMemory,
    KernelShape,
    Results,
    SharedMemory,
    specialize,
)
from rjax.pallas_kernels.attention.mosaic.mainloop import run_multi_row
from rjax.pallas_kernels.attention.mosaic.producer import run_producer
from rjax.pallas_kernels.attention.mosaic.swap_ab import run_swap_ab_decode
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import (
    PackedPlan,
    TileScheduler,
    WorkTile,
)
from rjax.pallas_kernels.mosaic.emit import begin_kernel

_CTA_AXIS, _WARPGROUP_AXIS = "cta", "wg"
_CONSUMER_REGISTERS = 232  # a thread


class Operands(NamedTuple):
    """Arrays of one attention call besides the plan.

    Attributes:
        options: the optional operands that were given, by name: ``alibi_slopes`` float32 [N],
            ``k_scales`` and ``v_scales`` float32 [K] or [P, K].
    """

    page_table: Int[Array, "B M"]
    positions: Int[Array, " T"]
    q: Float[Array, "T N H"]
    k_pages: Float[Array, "P K S H"]
    v_pages: Float[Array, "P K S H"]
    options: dict[str, Float32[Array, "..."]]


def attention_call(cfg: KernelConfig, packed: PackedPlan, operands: Operands) -> Results:
    """Launch the kernel. Rows with one partial result are in (out, lse), the others are not."""
    shape = _kernel_shape(packed, operands)
    T, N, H = operands.q.shape
    entries = max(1, packed.num_merge_entries)
    options = operands.options
    kernel = plgpu.kernel(
        _make_kernel(cfg, shape, tuple(options)),
        out_type=(
            jax.ShapeDtypeStruct((T, N, H), shape.q_dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((entries, N, H), shape.q_dtype),
            jax.ShapeDtypeStruct((entries, N), jnp.float32),
        ),
        scratch_types=SharedMemory.scratch_types(cfg, shape),
        grid=(cfg.num_ctas,),
        grid_names=(_CTA_AXIS,),
        num_threads=CONSUMERS + 1,
        thread_name=_WARPGROUP_AXIS,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # A TMA copy of queries may take more rows than there are.
    padding = max(0, max(map(shape.q_box, packed.lists)) - T)
    q = jnp.pad(operands.q, ((0, padding), (0, 0), (0, 0))).reshape(-1, shape.K, shape.G, H)
    if "alibi_slopes" in options:
        options = options | {"alibi_slopes": options["alibi_slopes"] / cfg.score_unit}
    plan = (packed.work_tiles, packed.schedule, packed.destinations)
    tables = (operands.page_table, operands.positions)
    return Results(
        *kernel(*plan, *tables, q, operands.k_pages, operands.v_pages, *options.values())
    )


def _kernel_shape(packed: PackedPlan, operands: Operands) -> KernelShape:
    """The static shapes of a launch."""
    T, N, H = operands.q.shape
    K, S = operands.k_pages.shape[1:3]
    single_row = any(work.tile_rows == 1 for work in packed.lists)
    return KernelShape(
        T=T,
        N=N,
        K=K,
        S=S,
        H=H,
        q_dtype=operands.q.dtype,
        kv_dtype=operands.k_pages.dtype,
        lists=packed.lists,
        swap_ab_columns=swap_ab_columns(N // K, H) if single_row else 0,
    )


def _make_kernel(cfg: KernelConfig, shape: KernelShape, options: tuple[str, ...]) -> Callable:
    """The kernel body; options: names of the optional operands there are.

    Its Refs are those of ``GlobalMemory.bind`` by position and of ``SharedMemory`` by name.
    """

    def attention_kernel(*operands_and_results, **scratch) -> None:
        gmem = GlobalMemory.bind(operands_and_results, options)
        smem = SharedMemory(**scratch)
        begin_kernel()
        pipeline = smem.pipeline(cfg, shape)
        wg = lax.axis_index(_WARPGROUP_AXIS)
        can_reverse = shape.has_cooperative and shape.has_head_pairs
        scheduler = TileScheduler.of(
            lax.axis_index(_CTA_AXIS), cfg.num_ctas, gmem.schedule, can_reverse
        )
        cta = Cta(cfg, shape, gmem, smem, pipeline, scheduler, wg)
        pl.when(wg == CONSUMERS)(lambda: run_producer(cta))
        pl.when(wg < CONSUMERS)(lambda: _run_consumer(cta))

    return attention_kernel


def _run_consumer(cta: Cta) -> None:
    """Compute one warpgroup's part of every work tile of the CTA."""
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    for stage in range(cta.cfg.q_stages):
        plgpu.barrier_arrive(cta.smem.q_empty.at[stage])
    for stage in range(cta.cfg.kv_stages):
        cta.pipeline.consumer_release(stage)
    cta.for_each_tile(functools.partial(_consume, cta))


def _consume(cta: Cta, tile: WorkTile, q_stage, kv_count) -> None:
    consumer = ConsumerTile.of(cta, tile, q_stage, kv_count)
    for buffer in consumer.q_part_buffers:
        plgpu.barrier_wait(cta.smem.q_full.at[buffer])
    uses_swap_ab = cta.shape.uses_swap_ab
    swap_ab = jnp.bool_(False)
    for index, uses in enumerate(uses_swap_ab):
        swap_ab = swap_ab | (tile.list_index == index) if uses else swap_ab

    def run(swap_ab: bool) -> None:
        run_swap_ab_decode(consumer) if swap_ab else run_multi_row(consumer)

    specialize(swap_ab, any(uses_swap_ab), not all(uses_swap_ab), run)
