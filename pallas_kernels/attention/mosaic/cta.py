"""One CTA: every Ref with its shape, dtype and memory space, the KV pipeline and the work tiles.

A CTA is three warpgroups: two consumers and a producer. All three run ``Cta.for_each_tile`` over
the same work tiles and count the same pipeline stages, so they meet only at barriers.

Axes: T query rows, N query heads, K KV heads, G = N / K, H head dim, W dims of a part of a head (H,
or H / 2 of a split head), P pages, S tokens a page, B sequences, M pages of a table row, U work
tiles, Y result slots, X merge entries, C columns of swap-AB decode. "16-bit" is the dtype of the
queries, bfloat16 or float16; KV pages have that dtype or float8_e4m3fn. Shared memory holds the
queries of one or two work tiles, the KV pipeline (``kv_pipeline``) and, for fp8 pages, one float16
V tile a consumer warpgroup; ``config`` sizes them.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import (
    CONSUMERS,
    KV_TILE,
    WGMMA_M,
    KernelConfig,
    q_box_rows,
    split_head_parts,
)
from rjax.pallas_kernels.attention.mosaic.kv_pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import (
    NUM_FIELDS,
    TileScheduler,
    WorkListShape,
    WorkTile,
)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelShape:
    """Static shapes of one launch.

    Attributes:
        T, N, K, S, H: axes, as above.
        q_dtype, kv_dtype: dtypes of the queries and of the KV pages.
        lists: the packed plan's work lists.
        swap_ab_columns: C; 0 where no work list runs swap-AB decode.
    """

    T: int
    N: int
    K: int
    S: int
    H: int
    q_dtype: Any
    kv_dtype: Any
    lists: tuple[WorkListShape, ...]
    swap_ab_columns: int

    @property
    def G(self) -> int:  # noqa: N802 - an axis letter
        """Query heads a KV head."""
        return self.N // self.K

    @property
    def parts(self) -> int:
        """Parts of a head, each of W dims: 2 where all work tiles are split heads, else 1."""
        return split_head_parts(self.H)

    @property
    def W(self) -> int:  # noqa: N802 - an axis letter
        """Dims of a part of a head: of a tile in shared memory and of an accumulator."""
        return self.H // self.parts

    @property
    def has_fp8_kv(self) -> bool:
        """Whether pages are float8_e4m3fn."""
        return self.kv_dtype != self.q_dtype

    @property
    def uses_swap_ab(self) -> tuple[bool, ...]:
        """Whether the work tiles of each list run swap-AB decode: items of a single row."""
        return tuple(self.swap_ab_columns > 0 and work.tile_rows == 1 for work in self.lists)

    @property
    def has_cooperative(self) -> bool:
        """Whether some list has cooperative work tiles."""
        return any(work.cooperative for work in self.lists)

    @property
    def has_head_pairs(self) -> bool:
        """Whether some list has head-pair or split-head work tiles."""
        return not all(work.cooperative for work in self.lists)

    @property
    def has_multi_row_head_pairs(self) -> bool:
        """Whether some list has such work tiles that do not run swap-AB decode."""
        pairs = zip(self.lists, self.uses_swap_ab, strict=True)
        return any(not work.cooperative and not swap_ab for work, swap_ab in pairs)

    def q_box(self, work: WorkListShape) -> int:
        """Query rows of one TMA copy; it takes no more rows than there are, rounded up."""
        return q_box_rows(min(work.warpgroup_rows, self.T), self.G, self.W)


class Results(NamedTuple):
    """Results in GMEM.

    out: 16-bit [T, N, H]; lse: float32 [T, N]; partial_out: 16-bit [X, N, H]; partial_lse: float32
    [X, N].
    """

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalMemory:
    """Operands and results in GMEM.

    Attributes:
        work_tiles: int32 [U, 8], records of ``WorkTile``.
        schedule: int32 [3], see ``TileScheduler.of``.
        destinations: int32 [Y], see ``PackedPlan``.
        page_table: int32 [B, M].
        positions: int32 [T].
        q: 16-bit [T, K, G, H].
        k_pages, v_pages: [P, K, S, H].
        results: written by the consumers.
        alibi_slopes: float32 [N] in the kernel's score units, or None.
        k_scales, v_scales: float32 [K] or [P, K] with fp8 pages, else None.
    """

    work_tiles: Any
    schedule: Any
    destinations: Any
    page_table: Any
    positions: Any
    q: Any
    k_pages: Any
    v_pages: Any
    results: Results
    alibi_slopes: Any = None
    k_scales: Any = None
    v_scales: Any = None

    @classmethod
    def bind(cls, refs: Sequence[Any], options: Sequence[str]) -> "GlobalMemory":
        """refs: operands in order of the attributes, those named in ``options``, the results."""
        operands, rest = refs[:8], refs[8:]
        given = dict(zip(options, rest[: len(options)], strict=True))
        return cls(*operands, Results(*rest[len(options) :]), **given)


@dataclasses.dataclass(frozen=True, slots=True)
class SharedMemory:
    """Scratch memory and barriers of a CTA.

    Attributes:
        q_views: union of views of the query buffers, Q = q_stages * 2 of them, one a warpgroup, or
            for split heads one a part:
            16-bit [Q, q_rows, W] in rows, as TMA writes them;
            [Q, 1 or 2, q_rows, W] of the pages' dtype, swizzled for wgmma (with fp8 pages the high
            and the low part), if a list has work tiles of many rows;
            two views of ``SwapAbSmem``, if a list runs swap-AB decode.
        kv_views: union of the two views of ``KVPipeline``.
        kv_full, kv_empty: barriers of ``KVPipeline``.
        q_full: barriers [Q]: the queries of a warpgroup have arrived.
        q_empty: barriers [q_stages]: both warpgroups have read their queries.
        warpgroup_order: barrier where the consumer warpgroups take turns on the tensor cores, and
            where they wait for each other's part of the queries of a split head.
        v_f16: float16 [2, 64, W], swizzled, a warpgroup's converted V tile; None without fp8 pages.
    """

    q_views: Any
    kv_views: Any
    kv_full: Any
    kv_empty: Any
    q_full: Any
    q_empty: Any
    warpgroup_order: Any
    v_f16: Any = None

    @staticmethod
    def scratch_types(cfg: KernelConfig, shape: KernelShape) -> dict[str, Any]:
        """What to allocate, by attribute. Offsets follow the alphabetical order of the names."""
        W, kv_dtype = shape.W, shape.kv_dtype
        tiling = wgmma_transforms(W, kv_dtype.itemsize)
        stages, tiles = cfg.kv_stages, KVPipeline.tiles(shape.parts)
        copies = KVPipeline.copies(shape.S, shape.parts)
        scratch: dict[str, Any] = dict(
            q_views=plgpu.RefUnion(*_q_views(cfg, shape)),
            kv_views=plgpu.RefUnion(
                plgpu.SMEM((stages, tiles, KV_TILE, W), kv_dtype, transforms=tiling),
                plgpu.SMEM((stages, tiles * KV_TILE, W), kv_dtype, transforms=tiling),
            ),
            kv_full=plgpu.Barrier(num_barriers=stages, num_arrivals=copies),
            kv_empty=plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
            q_full=plgpu.Barrier(num_barriers=cfg.q_stages * CONSUMERS),
            q_empty=plgpu.Barrier(num_barriers=cfg.q_stages, num_arrivals=CONSUMERS),
            warpgroup_order=plgpu.Barrier(num_arrivals=CONSUMERS),
        )
        if shape.has_fp8_kv:
            tile = (CONSUMERS, KV_TILE, W)
            scratch["v_f16"] = plgpu.SMEM(tile, jnp.float16, transforms=wgmma_transforms(W, 2))
        return scratch

    @property
    def q_tma(self):
        """The view of the query buffers that TMA writes."""
        return self.q_views[0]

    @property
    def q_wgmma(self):
        """The view of the query buffers that wgmma reads."""
        return self.q_views[1]

    def swap_ab_views(self, shape: KernelShape) -> tuple[Any, Any]:
        """The two views of the query buffers for swap-AB decode."""
        first = 1 if all(shape.uses_swap_ab) else 2
        return self.q_views[first], self.q_views[first + 1]

    def pipeline(self, cfg: KernelConfig, shape: KernelShape) -> KVPipeline:
        """The KV pipeline in this memory."""
        views, barriers = self.kv_views, (self.kv_full, self.kv_empty)
        return KVPipeline(views[0], views[1], *barriers, cfg.kv_stages, shape.parts)


def _q_views(cfg: KernelConfig, shape: KernelShape) -> list[Any]:
    """The views of the query buffers, see ``SharedMemory``. All begin where the union begins."""
    W, q_dtype, kv_dtype = shape.W, shape.q_dtype, shape.kv_dtype
    buffers = cfg.q_stages * CONSUMERS
    swizzled = wgmma_transforms(W, kv_dtype.itemsize)
    views = [plgpu.SMEM((buffers, cfg.q_rows, W), q_dtype)]
    if not all(shape.uses_swap_ab):
        terms = (buffers, q_dtype.itemsize // kv_dtype.itemsize, cfg.q_rows, W)
        views.append(plgpu.SMEM(terms, kv_dtype, transforms=swizzled))
    if any(shape.uses_swap_ab):
        C, size = shape.swap_ab_columns, cfg.q_rows * W * 2
        q_shape = (size // (C * W * kv_dtype.itemsize), C, W)
        p_shape = (size // (C * KV_TILE * 2), C, KV_TILE)
        p_dtype = jnp.float16 if shape.has_fp8_kv else q_dtype
        p_transforms = wgmma_transforms(KV_TILE, 2)
        views.append(plgpu.SMEM((buffers, *q_shape), kv_dtype, transforms=swizzled))
        views.append(plgpu.SMEM((buffers, *p_shape), p_dtype, transforms=p_transforms))
    return views


def wgmma_transforms(width: int, itemsize: int):
    """Tiling and swizzle of rows of ``width`` numbers in SMEM, as wgmma reads them."""
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


@dataclasses.dataclass(frozen=True, slots=True)
class Cta:
    """State that all work tiles of a CTA share. ``wg`` is the int32 index of the warpgroup."""

    cfg: KernelConfig
    shape: KernelShape
    gmem: GlobalMemory
    smem: SharedMemory
    pipeline: KVPipeline
    scheduler: TileScheduler
    wg: Any

    def for_each_tile(self, run: Callable[[WorkTile, Any, Any], None]) -> None:
        """``run(tile, q_stage, kv_count)`` for each work tile of this CTA.

        ``q_stage`` is the int32 query buffer of the work tile, ``kv_count`` the int32 number of
        pipeline stages used before it.
        """
        q_stages = self.cfg.q_stages
        first = self._read_record(jnp.int32(0))

        def step(number, carry):
            kv_count, record = carry
            following = self._read_record(number + 1)
            q_stage = lax.rem(number, jnp.int32(q_stages))
            tile = WorkTile.decode(record, self.shape.lists)
            run(tile, q_stage, kv_count)
            return kv_count + self.pipeline.step_stages * tile.num_steps, following

        lax.fori_loop(0, self.scheduler.num_tiles, step, (jnp.int32(0), first))

    def _read_record(self, number) -> tuple[Any, ...]:
        """The record of a work tile; read one tile ahead, which hides its latency."""
        work_tiles = self.gmem.work_tiles
        index = jnp.minimum(self.scheduler.tile_index(number), work_tiles.shape[0] - 1)
        return tuple(work_tiles[index, field] for field in range(NUM_FIELDS))


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerTile:
    """A work tile as one consumer warpgroup sees it.

    Attributes:
        cta, tile: the CTA and the work tile that all its warpgroups share.
        q_stage, kv_count: int32, the arguments of ``run`` in ``Cta.for_each_tile``.
        q_buffer: int32, the warpgroup's query buffer.
        kv_head: int32; the last head where a head pair has no second one.
        first_dim: int32, the first of the W dims of the output that the warpgroup computes.
        v_scale: float32 scalar, the scale of V in fp8 pages with one scale a KV head; else None.
    """

    cta: Cta
    tile: WorkTile
    q_stage: Any
    kv_count: Any
    q_buffer: Any
    kv_head: Any
    first_dim: Any
    v_scale: Any

    @classmethod
    def of(cls, cta: Cta, tile: WorkTile, q_stage, kv_count) -> "ConsumerTile":
        """The view of warpgroup ``cta.wg``."""
        q_buffer = q_stage * CONSUMERS + cta.wg
        kv_head, first_dim = tile.head, jnp.int32(0)
        if cta.shape.parts == 1:
            paired_head = jnp.minimum(tile.head + cta.wg, cta.shape.K - 1)
            kv_head = jnp.where(tile.cooperative, tile.head, paired_head)
        else:
            first_dim = cta.wg * cta.shape.W
        v_scales, v_scale = cta.gmem.v_scales, None
        if v_scales is not None and len(v_scales.shape) == 1:
            v_scale = v_scales[kv_head]
        return cls(cta, tile, q_stage, kv_count, q_buffer, kv_head, first_dim, v_scale)

    @property
    def q_rows(self):
        """The queries in the warpgroup's buffer, 16-bit [64, W] SMEM in rows: those of its matrix
        rows, or of a split head the warpgroup's part of them."""
        return self.cta.smem.q_tma.at[self.q_buffer, pl.ds(0, WGMMA_M)]

    @property
    def other_q_rows(self) -> tuple[Any, ...]:
        """The same of the other part of a split head; nothing for other work tiles."""
        if self.cta.shape.parts == 1:
            return ()
        other = self.q_stage * CONSUMERS + 1 - self.cta.wg
        return (self.cta.smem.q_tma.at[other, pl.ds(0, WGMMA_M)],)

    @property
    def q_part_buffers(self) -> tuple[Any, ...]:
        """The query buffers with all dims of the warpgroup's matrix rows."""
        if self.cta.shape.parts == 1:
            return (self.q_buffer,)
        return tuple(self.q_stage * CONSUMERS + part for part in range(CONSUMERS))

    @property
    def stores_lse(self):
        """int32, 0 where the other warpgroup of a split head stores the LSE, else 1."""
        return (self.first_dim == 0).astype(jnp.int32)

    def sync_parts(self) -> None:
        """Wait until the other warpgroup of a split head is here too: it has read the queries in
        rows, or has staged its part of them."""
        if self.cta.shape.parts > 1:
            plgpu.barrier_arrive(self.cta.smem.warpgroup_order)
            plgpu.barrier_wait(self.cta.smem.warpgroup_order)


def specialize(condition, when_true: bool, when_false: bool, run: Callable[[bool], Any]) -> Any:
    """``run(value)`` with the static value of ``condition`` (bool scalar).

    when_true, when_false: static, whether the condition can be true and whether it can be false.
    If both, the code is there twice and a branch selects.
    """
    if when_true != when_false:
        return run(when_true)
    return lax.cond(condition, lambda: run(True), lambda: run(False))
