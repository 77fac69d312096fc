"""Swap-AB decode: attention of one query row, its heads as the columns of wgmma.

wgmma computes at least 64 rows by 8 columns. The G heads of one row that share a KV head are few:
as rows they would be padded to 64, and the softmax with them. So the operands are swapped: S^T = K
Q^T and O^T += V^T P^T. K and V are the operands of 64 rows, heads are columns padded to C, a
multiple of 8, and the accumulator O^T takes W / 16 registers a thread for C = 8. One consumer
warpgroup computes one KV head of a head-pair work tile, or all scores and W of the H dims of a
split head, in steps of 64 tokens. Its four warps split the tokens of a step, so that Q, P and the
reductions over tokens go through shared memory (``swap_ab_smem``); the accumulator stays in
registers. Numbers are computed and summed in the order of ``mainloop``, so that both give the same
bits. Reads 2 * 64 * H * itemsize bytes of SMEM a step; writes 2 * H + 4 bytes a head to GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import KV_TILE
from rjax.pallas_kernels.attention.mosaic.cta import ConsumerTile
from rjax.pallas_kernels.attention.mosaic.epilogue import OutputRow, store_swap_ab
from rjax.pallas_kernels.attention.mosaic.fp8 import Fp8Tiles
from rjax.pallas_kernels.attention.mosaic.fragments import (
    COLUMNS,
    add_products,
    gather_columns,
    sum_eight_rows,
)
from rjax.pallas_kernels.attention.mosaic.kv_pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.mainloop import clear_unused_rows
from rjax.pallas_kernels.attention.mosaic.softmax import (
    INITIAL_MAX,
    SoftmaxState,
    add_alibi_bias,
    normalize,
    round_to_whole,
    soft_cap_scores,
)
from rjax.pallas_kernels.attention.mosaic.swap_ab_smem import SwapAbSmem

_WGMMA = plgpu.Layout.WGMMA


def run_swap_ab_decode(consumer: ConsumerTile) -> None:
    """Compute a single-row work tile: stage its queries, attend, write its result."""
    cta, tile = consumer.cta, consumer.tile
    shape, gmem = cta.shape, cta.gmem
    q_tiles, p_tiles = cta.smem.swap_ab_views(shape)
    smem = SwapAbSmem(
        consumer.q_rows,
        consumer.other_q_rows if shape.has_fp8_kv else (),
        q_tiles.at[consumer.q_buffer],
        tuple(q_tiles.at[buffer] for buffer in consumer.q_part_buffers),
        p_tiles.at[consumer.q_buffer],
        shape.swap_ab_columns,
        shape.W,
        shape.kv_dtype.itemsize,
    )
    smem.stage_queries()
    plgpu.commit_smem()
    consumer.sync_parts()
    slopes = None
    fp8 = Fp8Tiles.of(consumer, smem.query_scales()) if shape.has_fp8_kv else None
    if gmem.alibi_slopes is not None:
        first_head = consumer.kv_head * shape.G
        slopes = gather_columns(gmem.alibi_slopes, first_head, shape.swap_ab_columns)
    entry = gmem.destinations[tile.result_slot]  # long before it is needed
    position = gmem.positions[tile.row_start]
    state = SwapAbLoop.of(consumer, smem, position, slopes, fp8).run()
    # All warps have read the query buffer, and what they wrote there is done.
    plgpu.commit_smem()
    plgpu.barrier_arrive(cta.smem.q_empty.at[consumer.q_stage])
    live = tile.num_rows
    if shape.parts == 1:
        live = jnp.where(tile.head + cta.wg < shape.K, tile.num_rows, 0)
    head = consumer.kv_head * shape.G
    place = (consumer.first_dim, consumer.stores_lse)
    row = OutputRow(entry, tile.row_start, head, live, *place)
    row_sum = sum_eight_rows(state.row_sum)
    value, lse = normalize(state.acc, state.row_max, row_sum, consumer.v_scale, 1)
    store_swap_ab(gmem.results, value.astype(shape.q_dtype), lse, row, shape.G)


@dataclasses.dataclass(frozen=True, slots=True)
class SwapAbLoop:
    """The loop over a work tile's KV steps. State: acc [W, C], row_max [C], row_sum [64, C].

    Attributes:
        consumer: the work tile.
        smem: its staged queries.
        tokens: int32 [64, C], the token of each score in its tile.
        position: int32, the position of the query row.
        slopes: float32 [C], ALiBi slopes in score units, or None.
        fp8: scales and scratch memory for fp8 pages; None for 16-bit pages.
        unmasked_steps: int32, leading steps in which the row sees all tokens.
    """

    consumer: ConsumerTile
    smem: SwapAbSmem
    tokens: Any
    position: Any
    slopes: Any
    fp8: Fp8Tiles | None
    unmasked_steps: Any

    @classmethod
    def of(cls, consumer: ConsumerTile, smem: SwapAbSmem, position, slopes, fp8) -> "SwapAbLoop":
        """The loop of a query row at ``position``."""
        tile = consumer.tile
        tokens = plgpu.broadcasted_iota(jnp.int32, (KV_TILE, smem.C), 0, layout=_WGMMA)
        unmasked = jnp.int32(0)
        if consumer.cta.cfg.sliding_window is None:
            seen = jnp.maximum(tile.unmasked_stop - tile.kv_start, 0)
            unmasked = lax.div(seen, jnp.int32(KV_TILE))
        return cls(consumer, smem, tokens, position, slopes, fp8, unmasked)

    def run(self) -> SoftmaxState:
        """Run all steps."""
        W, C = self.smem.W, self.smem.C
        state = SoftmaxState(
            plgpu.layout_cast(jnp.zeros((W, C), jnp.float32), _WGMMA),
            plgpu.layout_cast(jnp.full((C,), INITIAL_MAX, jnp.float32), COLUMNS),
            plgpu.layout_cast(jnp.zeros((KV_TILE, C), jnp.float32), _WGMMA),
        )
        return lax.fori_loop(0, self.consumer.tile.num_steps, self._step, state)

    @property
    def _pipeline(self) -> KVPipeline:
        return self.consumer.cta.pipeline

    def _step(self, i, state: SoftmaxState) -> SoftmaxState:
        pipeline, scale = self._pipeline, self.consumer.cta.cfg.scale_log2
        acc, row_max, row_sum = state
        first = self.consumer.tile.kv_start + i * KV_TILE
        kv_count, wg = self.consumer.kv_count, self.consumer.cta.wg
        k_stages = pipeline.k_stages(kv_count, i)
        v_stage, *others = pipeline.v_stages(kv_count, i, wg)
        masked = i >= self.unmasked_steps
        products = self._multiply_keys(k_stages)
        for stage in k_stages:
            pipeline.consumer_release(stage)
        scores = self._scores(products, first, masked)
        new_max = jnp.maximum(row_max, round_to_whole(self.smem.column_max(scores) * scale))
        p = jnp.exp2(scores * scale - _down(new_max, scores.shape))
        p_dtype = jnp.float16 if self.fp8 is not None else pipeline.halves.dtype
        self.smem.store_probabilities(p, p.astype(p_dtype))
        pipeline.consumer_wait(v_stage)
        for other in others:
            pipeline.consumer_wait(other)
            pipeline.consumer_release(other)
        values = self._values(v_stage, first, masked)
        factor = jnp.exp2(row_max - new_max)
        row_sum = row_sum * _down(factor, row_sum.shape) + self.smem.row_sums()
        acc = acc * _down(factor, acc.shape)
        p_tile = self.smem.p_tile.transpose((1, 0))
        acc = add_products(acc, (values.transpose((1, 0)), p_tile))
        if self.fp8 is None:
            pipeline.consumer_release(v_stage)
        return SoftmaxState(acc, new_max, row_sum)

    @property
    def _half(self):
        """The tile of a stage that this warpgroup reads."""
        return self.consumer.cta.wg if self._pipeline.parts == 1 else 0

    def _multiply_keys(self, stages):
        """k @ q, float32 [64, C]."""
        pipeline = self._pipeline

        def multiply(acc):
            for stage, operands in zip(stages, self.smem.queries, strict=True):
                pipeline.consumer_wait(stage)
                keys = pipeline.halves.at[stage, self._half]
                for queries in operands:
                    plgpu.wgmma(acc, keys, queries.transpose((1, 0)))
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((KV_TILE, self.smem.C), jnp.float32)
        return pl.run_scoped(multiply, acc)

    def _scores(self, products, first, masked):
        """Scores of the tile at token ``first``, with -inf where the row does not see a key."""
        cfg = self.consumer.cta.cfg
        if self.fp8 is not None:
            products = self.fp8.scale_products(products, first, token_axis=0)
        if cfg.soft_cap is not None:
            products = soft_cap_scores(products, cfg.scale, cfg.soft_cap)
        if self.slopes is not None:
            products = add_alibi_bias(
                products, self.slopes, self.tokens, first, self.position, axis=1
            )
        return lax.cond(masked, lambda s: self._masked(s, first), lambda s: s, products)

    def _masked(self, scores, first):
        window = self.consumer.cta.cfg.sliding_window
        # The item has one row, so it sees all tokens before ``unmasked_stop``.
        seen = self.tokens < self.consumer.tile.unmasked_stop - first
        if window is not None:
            seen = seen & (self.tokens > self.position - window - first)
        return jnp.where(seen, scores, -jnp.inf)

    def _values(self, stage, first, masked):
        """The V tile, 16-bit [64, W] SMEM, zero from the item's end on."""
        used = self.consumer.tile.kv_stop - first
        tile = self._pipeline.halves.at[stage, self._half]
        if self.fp8 is None:
            clear_unused_rows(tile, used)
            plgpu.commit_smem()
            return tile
        values = self.fp8.convert_values(tile, first, used, masked)
        self._pipeline.consumer_release(stage)
        return values


def _down(column, shape):
    """A number a column, broadcast over the rows."""
    return lax.broadcast_in_dim(column, shape, [1])
