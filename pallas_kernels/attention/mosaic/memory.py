"""The memory of one CTA: every Ref with its shape, dtype and memory space.

Axes: T query rows, N query heads, K KV heads, G = N / K, H head dim, P pages, S tokens a page, B
sequences, M pages of a table row, U work tiles, Y result slots, X merge entries, C columns of
swap-AB decode. "16-bit" is the dtype of the queries, bfloat16 or float16; KV pages have that dtype
or float8_e4m3fn. Shared memory holds the queries of one or two work tiles, the KV pipeline and, for
fp8 pages, one float16 V tile a consumer warpgroup; ``config`` sizes them.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KV_TILE, KernelConfig, q_box_rows
from rjax.pallas_kernels.attention.mosaic.epilogue import Results
from rjax.pallas_kernels.attention.mosaic.kv_loads import KVLoads
from rjax.pallas_kernels.attention.mosaic.pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.swap_ab_smem import SwapAbSmem
from rjax.pallas_kernels.attention.mosaic.work_tile import WorkListShape


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
        """Whether some list has head-pair work tiles."""
        return not all(work.cooperative for work in self.lists)

    @property
    def has_multi_row_head_pairs(self) -> bool:
        """Whether some list has head-pair work tiles that do not run swap-AB decode."""
        pairs = zip(self.lists, self.uses_swap_ab, strict=True)
        return any(not work.cooperative and not swap_ab for work, swap_ab in pairs)

    def q_box(self, work: WorkListShape) -> int:
        """Query rows of one TMA copy; it takes no more rows than there are, rounded up."""
        return q_box_rows(min(work.warpgroup_rows, self.T), self.G, self.H)


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalMemory:
    """Operands and results in GMEM.

    Attributes:
        work_tiles: int32 [U, 8], see ``work_tile``.
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
        q_views: union of views of the query buffers, Q = q_stages * 2 of them, one a warpgroup:
            16-bit [Q, q_rows, H] in rows, as TMA writes them;
            [Q, 1 or 2, q_rows, H] of the pages' dtype, swizzled for wgmma (with fp8 pages the high
            and the low part), if a list has work tiles of many rows;
            two views of ``SwapAbSmem``, if a list runs swap-AB decode.
        kv_views: union of the two views of ``KVPipeline``.
        kv_full, kv_empty: barriers of ``KVPipeline``.
        q_full: barriers [Q]: the queries of a warpgroup have arrived.
        q_empty: barriers [q_stages]: both warpgroups have read their queries.
        warpgroup_order: barrier where the consumer warpgroups take turns on the tensor cores.
        v_f16: float16 [2, 64, H], swizzled, a warpgroup's converted V tile; None without fp8 pages.
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
        H, kv_dtype = shape.H, shape.kv_dtype
        tiling = wgmma_transforms(H, kv_dtype.itemsize)
        stages = cfg.kv_stages
        scratch: dict[str, Any] = dict(
            q_views=plgpu.RefUnion(*_q_views(cfg, shape)),
            kv_views=plgpu.RefUnion(
                plgpu.SMEM((stages, CONSUMERS, KV_TILE, H), kv_dtype, transforms=tiling),
                plgpu.SMEM((stages, CONSUMERS * KV_TILE, H), kv_dtype, transforms=tiling),
            ),
            kv_full=plgpu.Barrier(num_barriers=stages, num_arrivals=KVLoads.copies(shape.S)),
            kv_empty=plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS),
            q_full=plgpu.Barrier(num_barriers=cfg.q_stages * CONSUMERS),
            q_empty=plgpu.Barrier(num_barriers=cfg.q_stages, num_arrivals=CONSUMERS),
            warpgroup_order=plgpu.Barrier(num_arrivals=CONSUMERS),
        )
        if shape.has_fp8_kv:
            tile = (CONSUMERS, KV_TILE, H)
            scratch["v_f16"] = plgpu.SMEM(tile, jnp.float16, transforms=wgmma_transforms(H, 2))
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

    def pipeline(self, cfg: KernelConfig) -> KVPipeline:
        """The KV pipeline in this memory."""
        return KVPipeline(
            self.kv_views[0], self.kv_views[1], self.kv_full, self.kv_empty, cfg.kv_stages
        )


def _q_views(cfg: KernelConfig, shape: KernelShape) -> list[Any]:
    """The views of the query buffers, see ``SharedMemory``. All begin where the union begins."""
    H, q_dtype, kv_dtype = shape.H, shape.q_dtype, shape.kv_dtype
    buffers = cfg.q_stages * CONSUMERS
    swizzled = wgmma_transforms(H, kv_dtype.itemsize)
    views = [plgpu.SMEM((buffers, cfg.q_rows, H), q_dtype)]
    if not all(shape.uses_swap_ab):
        parts = (buffers, q_dtype.itemsize // kv_dtype.itemsize, cfg.q_rows, H)
        views.append(plgpu.SMEM(parts, kv_dtype, transforms=swizzled))
    if any(shape.uses_swap_ab):
        q_shape, p_shape = SwapAbSmem.view_shapes(
            cfg.q_rows, shape.swap_ab_columns, H, kv_dtype.itemsize
        )
        p_dtype = jnp.float16 if shape.has_fp8_kv else q_dtype
        p_transforms = wgmma_transforms(KV_TILE, 2)
        views.append(plgpu.SMEM((buffers, *q_shape), kv_dtype, transforms=swizzled))
        views.append(plgpu.SMEM((buffers, *p_shape), p_dtype, transforms=p_transforms))
    return views


def wgmma_transforms(width: int, itemsize: int):
    """Tiling and swizzle of rows of ``width`` numbers in SMEM, as wgmma reads them."""
    swizzle = plgpu.find_swizzle(width * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
