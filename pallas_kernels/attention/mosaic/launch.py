"""The launch of the Mosaic attention kernel: its memory, barriers and results."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportAbstractUsage=false

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic.config import (
    CONSUMERS,
    TILE,
    KernelConfig,
    query_box,
    row_columns,
)
from pallas_kernels.attention.mosaic.kernel import make_body
from pallas_kernels.attention.mosaic.pack import PackedPlan
from pallas_kernels.attention.mosaic.row_place import RowPlace
from pallas_kernels.attention.mosaic.tile_loads import TileLoads


def attention_call(
    cfg: KernelConfig, packed: PackedPlan, page_table, positions, q, k_pages, v_pages, numbers
):
    """Launch the kernel. numbers: of alibi_slopes [N], k_scales and v_scales [K] or [P, K]
    those there are.

    Returns (out [T, N, H], lse [T, N], part [X, N, H], part_lse [X, N]).

    Only rows with a single result are written to the first two, only the others to the last two.
    """
    T, N, H = q.shape
    _, K, S, _ = k_pages.shape
    entries = max(1, packed.entries)
    fp8 = k_pages.dtype != q.dtype
    tiled, kv_tiled = _tiled(H, 2), _tiled(H, k_pages.dtype.itemsize)
    buffers = cfg.query_buffers
    columns = row_columns(N // K, H) if any(w.tile_rows == 1 for w in packed.lists) else 0
    places = buffers * CONSUMERS
    q_views = [plgpu.SMEM((places, cfg.query_rows, H), q.dtype)]
    if any(work.tile_rows > 1 or not columns for work in packed.lists):
        # In the tiles' dtype: one array, or the two parts for pages of 8 bits.
        parts = (places, q.dtype.itemsize // k_pages.dtype.itemsize, cfg.query_rows, H)
        q_views.append(plgpu.SMEM(parts, k_pages.dtype, transforms=kv_tiled))
    if columns:
        tiles, weights = RowPlace.views(cfg.query_rows, columns, H, k_pages.dtype.itemsize)
        weight_dtype = jnp.float16 if fp8 else q.dtype
        # Of one place as large as each of the first view: all begin where the union begins.
        q_views.append(plgpu.SMEM((places, *tiles), k_pages.dtype, transforms=kv_tiled))
        q_views.append(plgpu.SMEM((places, *weights), weight_dtype, transforms=_tiled(TILE, 2)))
    scratch = {}
    if fp8:
        scratch = {"scratch": plgpu.SMEM((CONSUMERS, TILE, H), jnp.float16, transforms=tiled)}
    kernel = plgpu.kernel(
        make_body(cfg, packed.lists, T, N, K, S, H, tuple(numbers), columns),
        out_type=(
            jax.ShapeDtypeStruct((T, N, H), q.dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((entries, N, H), q.dtype),
            jax.ShapeDtypeStruct((entries, N), jnp.float32),
        ),
        scratch_types=dict(
            q_smem=plgpu.RefUnion(*q_views),
            # By halves of a slot, and whole.
            kv_views=plgpu.RefUnion(
                plgpu.SMEM((cfg.ring, CONSUMERS, TILE, H), k_pages.dtype, transforms=kv_tiled),
                plgpu.SMEM((cfg.ring, CONSUMERS * TILE, H), k_pages.dtype, transforms=kv_tiled),
            ),
            q_full=plgpu.Barrier(num_barriers=places),
            q_free=plgpu.Barrier(num_barriers=buffers, num_arrivals=CONSUMERS),
            full=plgpu.Barrier(num_barriers=cfg.ring, num_arrivals=TileLoads.copies(S)),
            free=plgpu.Barrier(num_barriers=cfg.ring, num_arrivals=CONSUMERS),
            turn=plgpu.Barrier(num_arrivals=CONSUMERS),
        )
        | scratch,
        grid=(cfg.programs,),
        grid_names=("program",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    # A copy takes no more rows than there are.
    boxes = (query_box(min(work.half_rows, T), N // K, H) for work in packed.lists)
    padding = max(0, max(boxes) - T)
    q4 = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(-1, K, N // K, H)
    if "alibi_slopes" in numbers:
        numbers = numbers | {"alibi_slopes": numbers["alibi_slopes"] / cfg.unit}
    plan = (packed.units, packed.order, packed.dest)
    return kernel(*plan, page_table, positions, q4, k_pages, v_pages, *numbers.values())


def _tiled(H: int, itemsize: int):
    """How the tensor cores read rows of H numbers in shared memory."""
    swizzle = plgpu.find_swizzle(H * itemsize * 8)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)
