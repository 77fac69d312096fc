"""The multi-row mainloop: online-softmax attention of 64 matrix rows over a work tile's KV steps.

One consumer warpgroup stages its queries for wgmma, then computes S = Q K^T and O += P V: Q and K
from SMEM, P from registers, V from SMEM, S and O in registers. In a cooperative work tile it reads
both 64-token tiles of a step, in a head pair the one of its own KV head. Of a split head both
warpgroups compute all scores, and each accumulates its part of the dims of V. A part of a step is
one or two tiles whose scores fit in registers together: two for 16-bit KV and head dims up to 128,
else one. With ping-pong the two warpgroups of a cooperative work tile take turns on the tensor
cores, half a part apart, so that the softmax of one overlaps the products of the other. Reads
64 * (H + W) * itemsize bytes of SMEM a tile and writes SMEM only for the queries and to clear
unused V rows. Writes 2 * W + 4 bytes a live matrix row to GMEM.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KV_TILE, WGMMA_M
from rjax.pallas_kernels.attention.mosaic.cta import ConsumerTile, specialize
from rjax.pallas_kernels.attention.mosaic.epilogue import OutputRows, store_lse, store_rows
from rjax.pallas_kernels.attention.mosaic.fp8 import Fp8Tiles, split_queries
from rjax.pallas_kernels.attention.mosaic.fragments import (
    add_products,
    gather_heads,
    gather_rows,
    load_tile,
)
from rjax.pallas_kernels.attention.mosaic.kv_pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.softmax import (
    Softmax,
    SoftmaxState,
    initial_state,
    normalize,
    rescale,
)

_WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """A warpgroup's rows of a work tile; int32 scalars.

    In a cooperative work tile the first warpgroup takes the first half of the item's rows and the
    second one the rest; in a head pair each takes all rows of its KV head, and of a split head each
    takes all rows.

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
    def of(cls, consumer: ConsumerTile) -> "_Rows":
        cta, tile = consumer.cta, consumer.tile
        shift = jnp.where(tile.cooperative, cta.wg * tile.warpgroup_rows, 0)
        head = tile.head
        if cta.shape.parts == 1:
            head = jnp.where(tile.cooperative, tile.head, tile.head + cta.wg)
        share = jnp.clip(tile.num_rows - shift, 0, tile.warpgroup_rows)
        live = jnp.where(tile.cooperative, share, tile.num_rows)
        live = jnp.where(head < cta.shape.K, live, 0)
        loaded = jnp.maximum(live, 1)
        first = tile.row_start + jnp.minimum(shift, tile.num_rows - 1)
        return cls(shift, head, live, loaded, first)


def run_multi_row(consumer: ConsumerTile) -> None:
    """Compute 64 matrix rows of a work tile and write their results."""
    cta, tile = consumer.cta, consumer.tile
    shape, gmem = cta.shape, cta.gmem
    G = shape.G
    rows = _Rows.of(consumer)
    positions = gather_rows(gmem.positions, rows.first, rows.loaded, G)
    entry = gather_rows(gmem.destinations, tile.result_slot + rows.shift, rows.loaded, G)
    fp8 = _stage_queries(consumer, rows)
    slopes = None
    if gmem.alibi_slopes is not None:
        slopes = gather_heads(gmem.alibi_slopes, rows.head * G, G)

    # Only the mainloop is specialized: instruction fetches are cold in a whole step.
    def run(cooperative: bool):
        return Mainloop.of(consumer, positions, slopes, fp8, cooperative).run()

    state = specialize(tile.cooperative, shape.has_cooperative, shape.has_multi_row_head_pairs, run)
    first_row, head = tile.row_start + rows.shift, rows.head * G
    target = OutputRows(entry, first_row, head, rows.live, consumer.first_dim)
    value, lse = normalize(state.acc, state.row_max, state.row_sum.sum(axis=1), consumer.v_scale, 0)
    store_rows(gmem.results, value.astype(shape.q_dtype), target, G)
    store_lse(gmem.results, lse, target._replace(live=rows.live * consumer.stores_lse), G)


def _stage_queries(consumer: ConsumerTile, rows: _Rows) -> Fp8Tiles | None:
    """Rewrite the query buffer in place, from rows to wgmma's layout."""
    cta, shape = consumer.cta, consumer.cta.shape
    fp8 = None
    if shape.has_fp8_kv:
        operands, q_scale = split_queries(consumer.q_rows, consumer.other_q_rows)
        fp8 = Fp8Tiles.of(consumer, q_scale)
    else:
        tile = load_tile(consumer.q_rows, rows.loaded * shape.G, shape.W, shape.q_dtype)
        operands = (tile,)
    plgpu.commit_smem()
    if shape.has_fp8_kv:
        consumer.sync_parts()
    for n, operand in enumerate(operands):
        cta.smem.q_wgmma.at[consumer.q_buffer, n, pl.ds(0, WGMMA_M)][...] = operand
    plgpu.commit_smem()
    consumer.sync_parts()
    return fp8


@dataclasses.dataclass(frozen=True, slots=True)
class Mainloop:
    """One warpgroup's loop over the KV steps of a work tile.

    Attributes:
        consumer: the work tile. Its query buffers hold one operand [64, W] for each part of a head,
            or with fp8 pages two whose products with the keys add up.
        halves: int32 scalars, the tiles of a pipeline stage that this warpgroup reads in order.
        softmax: the softmax step.
        unmasked_steps: int32, leading steps in which every row sees all tokens.
        order: barrier for ping-pong, or None.
    """

    consumer: ConsumerTile
    halves: tuple[Any, ...]
    softmax: Softmax
    unmasked_steps: Any
    order: Any

    @classmethod
    def of(
        cls, consumer: ConsumerTile, positions, slopes, fp8: Fp8Tiles | None, cooperative: bool
    ) -> "Mainloop":
        """The loop of a work tile of the static kind ``cooperative``.

        Args:
            positions: int32 [64], the position of each matrix row's query.
            slopes: float32 [64], ALiBi slopes in score units, or None.
            fp8: scales and scratch memory for fp8 pages; None for 16-bit pages.
        """
        cta, tile = consumer.cta, consumer.tile
        halves: tuple[Any, ...] = (cta.wg,)
        if cooperative or cta.shape.parts > 1:
            halves = tuple(jnp.int32(n) for n in range(cta.pipeline.tiles(cta.shape.parts)))
        softmax = Softmax.of(
            cta.cfg,
            tile.kv_stop,
            positions,
            slopes,
            fp8,
            cta.pipeline.halves.dtype,
        )
        unmasked = jnp.int32(0)
        if cta.cfg.sliding_window is None:
            size = jnp.int32(KV_TILE * len(halves))
            unmasked = lax.div(jnp.maximum(tile.unmasked_stop - tile.kv_start, 0), size)
        order = cta.smem.warpgroup_order if cooperative and cta.cfg.ping_pong else None
        return cls(consumer, halves, softmax, unmasked, order)

    def run(self) -> SoftmaxState:
        """Run all steps, then release the query buffer."""
        cta, tile = self.consumer.cta, self.consumer.tile
        if self.order is not None:  # the second warpgroup stays half a part behind the first
            pl.when(cta.wg == 1)(self._switch_warpgroups)
        # One loop with a masking branch inside, not two loops: instruction fetches are cold.
        state = lax.fori_loop(0, tile.num_steps, self._step, initial_state(cta.shape.W))
        plgpu.barrier_arrive(cta.smem.q_empty.at[self.consumer.q_stage])
        if self.order is not None:
            pl.when(cta.wg == 0)(self._switch_warpgroups)
        return state

    @property
    def _pipeline(self) -> KVPipeline:
        return self.consumer.cta.pipeline

    @property
    def _parts(self) -> tuple[tuple[int, ...], ...]:
        """Tiles of a step that are processed together."""
        tiles = tuple(range(len(self.halves)))
        together = self.softmax.fp8 is None and self.consumer.cta.shape.H <= 2 * KV_TILE
        return (tiles,) if together else tuple((n,) for n in tiles)

    def _step(self, i, state: SoftmaxState) -> SoftmaxState:
        """Run step ``i``, part after part: scores, softmax, values."""
        kv_count, wg = self.consumer.kv_count, self.consumer.cta.wg
        k_stages = self._pipeline.k_stages(kv_count, i)
        v_stages = self._pipeline.v_stages(kv_count, i, wg)
        for part in self._parts:
            products = self._multiply_keys(i, k_stages, part)
            if part == self._parts[-1]:
                for stage in k_stages:
                    self._pipeline.consumer_release(stage)
            first_tokens = tuple(self._first_token(i, n) for n in part)
            masked = i >= self.unmasked_steps
            tiles = self.softmax.probabilities(products, first_tokens, state.row_max, masked)
            state, p = rescale(state, tiles)
            acc = self._add_values(i, v_stages, part, state.acc, p)
            state = state._replace(acc=acc)
        return state

    def _multiply_keys(self, i, stages, part: tuple[int, ...]):
        """q @ k for the tiles of a part, float32 [64, 64] each."""

        def multiply(acc):
            if part == self._parts[0]:
                for stage in stages:
                    self._pipeline.consumer_wait(stage)
            for number, stage in enumerate(stages):
                self._issue_keys(acc, i, number, stage, part)
            if self.order is not None:
                self._switch_warpgroups()
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((WGMMA_M, len(part) * KV_TILE), jnp.float32)
        return _split_tiles(pl.run_scoped(multiply, acc))

    def _issue_keys(self, acc, i, number: int, stage, part: tuple[int, ...]) -> None:
        """Issue the wgmma of the keys of a part of a step, in part ``number`` of the dims."""
        consumer, pipeline = self.consumer, self._pipeline
        queries = consumer.cta.smem.q_wgmma
        # Without the barrier the query addresses are computed before the loop and fill registers.
        buffer, _ = lax.optimization_barrier((consumer.q_part_buffers[number], i))
        if len(part) == CONSUMERS:
            keys = pipeline.whole.at[stage]
        else:
            keys = pipeline.halves.at[stage, self.halves[part[0]]]
        for n in range(queries.shape[1]):
            rows = queries.at[buffer, n, pl.ds(0, WGMMA_M)]
            plgpu.wgmma(acc, rows, keys.transpose((1, 0)))

    def _add_values(self, i, stages, part: tuple[int, ...], acc, p):
        """acc + p @ v over the tiles of a part; releases the stages after its last part.

        stages: the stage that this warpgroup reads, then the stages of other parts of the dims.
        """
        stage, *others = stages
        first, last = part == self._parts[0], part == self._parts[-1]
        fp8 = self.softmax.fp8 is not None
        if self.order is not None:
            acc, p = lax.optimization_barrier((acc, p))
            plgpu.barrier_arrive(self.order)
        if first:
            self._pipeline.consumer_wait(stage)
        for other in others:
            self._pipeline.consumer_wait(other)
            self._pipeline.consumer_release(other)
        if self.order is not None:
            plgpu.barrier_wait(self.order)
        values = tuple(self._values(i, stage, n) for n in part)
        if fp8 and last:
            self._pipeline.consumer_release(stage)
        acc = add_products(acc, *zip(p, values, strict=True))
        if not fp8 and last:
            self._pipeline.consumer_release(stage)
        return acc

    def _values(self, i, stage, n: int):
        """V tile ``n`` of the step, 16-bit [64, W] SMEM, zero from the item's end on."""
        fp8, kv_stop = self.softmax.fp8, self.consumer.tile.kv_stop
        tile = self._pipeline.halves.at[stage, self.halves[n]]
        used = kv_stop - self._first_token(i, n)
        if fp8 is None:
            clear_unused_rows(tile, used)
            return tile
        return fp8.convert_values(tile, self._first_token(i, n), used, i >= self.unmasked_steps)

    def _first_token(self, i, n: int):
        """The first token of tile ``n`` of step ``i``, int32."""
        return self.consumer.tile.kv_start + i * (KV_TILE * len(self.halves)) + n * KV_TILE

    def _switch_warpgroups(self) -> None:
        """Let the other warpgroup use the tensor cores and wait until it lets this one."""
        plgpu.barrier_arrive(self.order)
        plgpu.barrier_wait(self.order)


def _split_tiles(products):
    """[64, 64] arrays out of one, or of two side by side."""
    if products.shape[1] == KV_TILE:
        return (products,)
    kind = plgpu.ShapeDtypeStruct((WGMMA_M, KV_TILE), jnp.float32, layout=_WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=(kind, kind))
    def split(_, products_):
        return products_[:, :KV_TILE], products_[:, KV_TILE:]

    return split(products)


def clear_unused_rows(tile, used) -> None:
    """Zero the rows of a V tile from ``used`` (int32) on.

    tile: 16-bit [64, H] SMEM. Stale rows may be NaN, and 0 * NaN is NaN.
    """

    @pl.when(used < KV_TILE)
    def _():
        H = tile.shape[1]
        width = H if H <= 2 * KV_TILE else KV_TILE  # few registers for large head dims
        for start in range(0, H, width):
            columns = tile.at[:, pl.ds(start, width)]
            value = plgpu.layout_cast(columns[...], _WGMMA)
            rows = plgpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=_WGMMA)
            columns[...] = jnp.where(rows < used, value, jnp.zeros_like(value))
        plgpu.commit_smem()
