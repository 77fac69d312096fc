"""The producer warpgroup: streams the queries and the KV of each work tile into shared memory.

Everything is TMA from GMEM to SMEM. Bytes of a work tile: the queries of its item, rounded up to
whole TMA boxes, and 2 * tokens * H * itemsize a KV head, K and V, each once. A tile of 64 tokens is
one copy where pages have 64 tokens or more, else one copy a page. A cooperative step loads 128
tokens of one KV head, a head-pair step 64 tokens of two, a split-head step 64 tokens of one in two
parts of its dims. Only the used part of a head's last tile
is loaded, rounded up to 16, 32, 48 or 64 tokens (cooperative: to 128); the other rows hold stale
data, and the consumers mask their scores and clear their V rows.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import (
    CONSUMERS,
    EVICT_FIRST_MAX_ROWS,
    KV_TILE,
    LAST_TILE_TOKENS,
)
from rjax.pallas_kernels.attention.mosaic.cta import Cta, specialize
from rjax.pallas_kernels.attention.mosaic.kv_pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import WorkListShape, WorkTile
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_REGISTERS = 40  # a thread; the consumers take the others


def run_producer(cta: Cta) -> None:
    """Load every work tile of the CTA."""
    plgpu.set_max_registers(_REGISTERS, action="decrease")
    cta.for_each_tile(functools.partial(_produce, cta))


def _produce(cta: Cta, tile: WorkTile, q_stage, kv_count) -> None:
    shape, gmem = cta.shape, cta.gmem

    def load_queries() -> None:
        plgpu.barrier_wait(cta.smem.q_empty.at[q_stage])
        for index, work in enumerate(shape.lists):
            if len(shape.lists) == 1:
                _load_queries(cta, tile, work, q_stage)
            else:
                load = functools.partial(_load_queries, cta, tile, work, q_stage)
                pl.when(tile.list_index == index)(load)

    # Split heads have one query buffer, free when the work tile before ends, so KV goes first.
    kv_first = shape.parts > 1
    if kv_first:
        pl.when(tile.num_steps == 0)(load_queries)
    else:
        load_queries()

    def load_kv(cooperative: bool):
        # In steps of many rows, many multi-row work tiles read the same KV.
        shared = cooperative or shape.parts > 1
        evict_first = shape.T <= EVICT_FIRST_MAX_ROWS or not shared
        pools = (gmem.k_pages, gmem.v_pages)
        loads = KVLoads(tile, pools, gmem.page_table, cooperative, evict_first)
        loads.run(cta.pipeline, kv_count, load_queries if kv_first else None)

    specialize(tile.cooperative, shape.has_cooperative, shape.has_head_pairs, load_kv)


def _load_queries(cta: Cta, tile: WorkTile, work: WorkListShape, q_stage) -> None:
    """Start one copy for each consumer warpgroup: its half of the rows, its KV head, or its part of
    the dims."""
    shape, smem = cta.shape, cta.smem
    box, one_head = shape.q_box(work), work.cooperative or shape.parts > 1
    for w in range(CONSUMERS):
        row = tile.row_start + (w * work.warpgroup_rows if work.cooperative else 0)
        head = tile.head if one_head else jnp.minimum(tile.head + w, shape.K - 1)
        buffer = q_stage * CONSUMERS + w
        target = smem.q_tma.at[buffer, pl.ds(0, box * shape.G)]
        dims = pl.ds(w * shape.W if shape.parts > 1 else 0, shape.W)
        _copy_queries(cta.gmem.q, pl.ds(row, box), head, dims, target, smem.q_full.at[buffer])


def _copy_queries(q, rows: pl.Slice, head, dims: pl.Slice, target, barrier) -> None:
    """Start the copy of some rows and dims of [T, K, G, H] GMEM to [rows * G, W] SMEM.

    Rows beyond the last one become 0.
    """
    source = q.at[rows, head, :, dims]
    plgpu.copy_gmem_to_smem(source, target.reshape(*source.shape), barrier)


@dataclasses.dataclass(frozen=True, slots=True)
class KVLoads:
    """The copies of one work tile.

    Attributes:
        tile: the work tile.
        pools: k_pages and v_pages, [P, K, S, H] GMEM.
        page_table: int32 [B, M] GMEM.
        cooperative: static kind of the work tile.
        evict_first: static; the L2 cache may drop the bytes first, because nothing reads them
            again soon.
    """

    tile: WorkTile
    pools: tuple[Any, Any]
    page_table: Any
    cooperative: bool
    evict_first: bool

    def run(self, pipeline: KVPipeline, kv_count, load_queries: Callable[[], None] | None) -> None:
        """Load all steps, as stages become free.

        Args:
            kv_count: int32, stages used before.
            load_queries: called after the first step, unless None.
        """
        read_ahead = self._page_size >= KV_TILE  # smaller pages are too many ids for registers

        def step(i, carry):
            count, pages = carry
            following = self._pages(i + 1) if read_ahead else ()
            pages = pages or self._pages(i)
            for pool in self.pools:
                for part in range(pipeline.parts):
                    stage = pipeline.stage(count)
                    pipeline.producer_acquire(stage)
                    self._fill(pipeline, stage, pool, part, self._first_token(i), pages)
                    count = count + 1
            if load_queries is not None:
                pl.when(i == 0)(load_queries)
            return count, following

        first_pages = self._pages(jnp.int32(0)) if read_ahead else ()
        lax.fori_loop(0, self.tile.num_steps, step, (kv_count, first_pages))

    @property
    def _page_size(self) -> int:
        return self.pools[0].shape[2]

    @property
    def _copy_tokens(self) -> int:
        """Tokens of a whole copy."""
        return min(self._page_size, KV_TILE)

    @property
    def _step_tokens(self) -> int:
        return KV_TILE * (CONSUMERS if self.cooperative else 1)

    @property
    def _last_token(self):
        return self.tile.kv_stop - 1

    def _first_token(self, i):
        return self.tile.kv_start + i * self._step_tokens

    def _pages(self, i):
        """The page id of each copy of one head in step ``i``; beyond the item its last page."""
        S = jnp.int32(self._page_size)
        last = lax.div(self._last_token, S)
        offsets = range(0, self._step_tokens, self._copy_tokens)
        numbers = (lax.div(self._first_token(i) + t, S) for t in offsets)
        return tuple(self.page_table[self.tile.table_row, jnp.minimum(n, last)] for n in numbers)

    def _fill(self, pipeline: KVPipeline, stage, pool, part: int, first_token, pages) -> None:
        """Fill the tiles of a stage with a part of the dims.

        pages: the page ids of the step's copies of one head.
        """
        tile_pages = KV_TILE // self._copy_tokens
        dims = pool.shape[3] // pipeline.parts
        for w in range(pipeline.tiles(pipeline.parts)):
            if self.cooperative:
                head, first = self.tile.head, first_token + w * KV_TILE
                own_pages = pages[w * tile_pages : (w + 1) * tile_pages]
            else:
                head, first = jnp.minimum(self.tile.head + w, pool.shape[1] - 1), first_token
                own_pages = pages
            for n, page in enumerate(own_pages):
                copy = _PageCopy(
                    page=pool.at[page, head],
                    dims=pl.ds(part * dims, dims),
                    pipeline=pipeline,
                    stage=stage,
                    half=w,
                    first_token=first,
                    number=n,
                    evict_first=self.evict_first,
                )
                self._start(copy)

    def _start(self, copy: "_PageCopy") -> None:
        """Start a copy; without cooperation of no more than the used tokens."""
        size = self._copy_tokens
        if self.cooperative:
            copy.start(size)
        elif self._page_size >= KV_TILE:
            used = self._last_token - copy.first_token + 1
            _start_smallest(LAST_TILE_TOKENS, used, copy)
        elif copy.number == 0:
            copy.start(size)
        else:
            used = copy.first_token + copy.number * size <= self._last_token
            lax.cond(used, lambda: copy.start(size), lambda: copy.skip())


@dataclasses.dataclass(frozen=True, slots=True)
class _PageCopy:
    """One TMA copy of a page, or of 64 tokens of a larger page.

    Attributes:
        page: [S, H] GMEM.
        dims: the dims to copy.
        pipeline, stage, half: the tile that it fills; ``half`` is static.
        first_token: int32, the first token of the tile.
        number: static, the index of the copy in its tile.
        evict_first: static; whether the L2 cache may drop the bytes first, see ``KVLoads``.
    """

    page: Any
    dims: pl.Slice
    pipeline: KVPipeline
    stage: Any
    half: int
    first_token: Any
    number: int
    evict_first: bool

    def start(self, tokens: int) -> None:
        """Copy the first ``tokens`` tokens."""
        S = self.page.shape[0]
        offset = 0
        if tokens != S:
            offset = pl.multiple_of(lax.rem(self.first_token, jnp.int32(S)), KV_TILE)
        source = self.page.at[pl.ds(offset, tokens), self.dims]
        rows = pl.ds(self.number * min(S, KV_TILE), tokens)
        target = self.pipeline.halves.at[self.stage, self.half, rows]
        plgpu.copy_gmem_to_smem(source, target, self.pipeline.full.at[self.stage])
        if self.evict_first:
            evict_first()

    def skip(self) -> None:
        """Copy nothing, but arrive at the barrier, which counts all copies."""
        plgpu.barrier_arrive(self.pipeline.full.at[self.stage])


def _start_smallest(sizes: tuple[int, ...], used, copy: _PageCopy) -> None:
    """Start the copy with the smallest of these sizes that covers ``used``, or the largest."""
    *smaller, size = sizes
    if not smaller:
        copy.start(size)
    else:
        more = used > smaller[-1]
        lax.cond(
            more,
            lambda: copy.start(size),
            lambda: _start_smallest(tuple(smaller), used, copy),
        )
