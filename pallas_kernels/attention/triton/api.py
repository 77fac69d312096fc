"""The triton backend's entry point: checks, packing, attention kernel, relay fusion."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.options import apply_sinks, check_per_head
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.attention.triton.config import HEAD_DIMS, WIDE_ROWS, Tiling, tiling
from pallas_kernels.attention.triton.kernel import attention_kernel
from pallas_kernels.attention.triton.pack import PackedPlan, pack_plan
from pallas_kernels.attention.work_list import AttentionPlan
from pallas_kernels.fp8 import Scales, check_scales
from pallas_kernels.relay_fusion.triton import merge_in_place


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, " T"],
    plan: AttentionPlan | PackedPlan,
    spec: AttentionSpec,
    *,
    alibi_slopes: Float[Array, " N"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
    num_ctas: int | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attention of packed query rows over paged KV, as the plan says; same contract as xla.

    Args:
        q: rotated queries, bfloat16 or float16.
        k_pages, v_pages: the pool, q's dtype or float8_e4m3fn; any page size.
        page_table: int32 page ids of each sequence; entries past its length are never used.
        positions: int32 absolute position of each row; negative for padding rows.
        plan: the work lists; pack it once a step with ``pack_plan`` where layers share it.
        spec: scale, cap and mask.
        alibi_slopes, sinks: float32, one a query head, as in the xla backend.
        k_scales, v_scales: float32 [K] or [P, K], of float8_e4m3fn pages, as in the xla backend;
            weights times scales of values are rounded to q's dtype.
        num_ctas: persistent CTAs to launch; None for a few times what the device holds at once.

    Returns:
        Output in q's dtype and natural-log LSE in float32; 0 and -inf for rows that see nothing,
        with sinks too.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
        ImportError: jax-triton, or the GPU support of jax that it needs, is not installed.
    """
    N, K = q.shape[1], k_pages.shape[1]
    _check(q, k_pages, v_pages, page_table, positions)
    check_per_head(N, alibi_slopes=alibi_slopes, sinks=sinks)
    check_scales(k_pages, v_pages, k_scales, v_scales)
    packed = plan if isinstance(plan, PackedPlan) else pack_plan(plan, (N, K))
    if packed.heads != (N, K) or packed.merge_indptr.shape[0] != q.shape[0] + 1:
        raise ValueError(
            f"the plan is packed for {packed.merge_indptr.shape[0] - 1} rows and (N, K) = "
            f"{packed.heads}; there are {q.shape[0]} rows and ({N}, {K})"
        )
    config = tiling(q.shape[2])
    if num_ctas is not None:
        config = dataclasses.replace(config, num_ctas=num_ctas)
    numbers = (alibi_slopes, k_scales, v_scales)
    return _launch(spec, config, packed, page_table, positions, q, k_pages, v_pages, numbers, sinks)


# Compiled as a function of its own: a model's layers then share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    spec: AttentionSpec,
    config: Tiling,
    packed: PackedPlan,
    page_table,
    positions,
    q,
    k_pages,
    v_pages,
    numbers,
    sinks,
):
    import jax_triton

    T, N, H = q.shape
    K, S = k_pages.shape[1:3]
    fp8 = k_pages.dtype != q.dtype
    if fp8:  # Ampere has no such type: the kernel takes the bits
        k_pages, v_pages = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k_pages, v_pages))
    slopes, k_scales, v_scales = numbers
    unread = jnp.zeros(1, jnp.float32)
    out, lse, part, part_lse = jax_triton.triton_call(
        packed.blocks,
        packed.counts,
        page_table,
        positions,
        packed.dest,
        q,
        k_pages,
        v_pages,
        *(unread if x is None else x for x in numbers),
        page_table.shape[1],
        kernel=attention_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((T, N, H), q.dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((packed.entries, N, H), q.dtype),
            jax.ShapeDtypeStruct((packed.entries, N), jnp.float32),
        ),
        grid=(min(config.num_ctas, packed.blocks.shape[0] * K),),
        num_warps=config.warps,
        num_stages=config.stages,
        N=N,
        K=K,
        H=H,
        S=S,
        NARROW_ROWS=packed.narrow_rows,
        WIDE_ROWS=WIDE_ROWS,
        TILE=config.tokens,
        SCALE=float(spec.scale),
        WINDOW=spec.sliding_window or 0,
        SOFT_CAP=float(spec.soft_cap or 0),
        ALIBI=slopes is not None,
        FP8=fp8,
        SCALES_PER_PAGE=fp8 and k_scales.ndim == 2,
    )
    out, lse = merge_in_place(out, lse, part, part_lse, packed.merge_indptr)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def _check(q, k_pages, v_pages, page_table, positions) -> None:
    T, N, H = q.shape
    K = k_pages.shape[1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"q is {q.dtype}; the triton backend takes bfloat16 or float16")
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn) or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages are {k_pages.dtype} and v_pages {v_pages.dtype}; both must have q's dtype, "
            f"{q.dtype}, or both be float8_e4m3fn"
        )
    if H not in HEAD_DIMS or k_pages.shape[3] != H:
        raise ValueError(
            f"the head dim is {H} for q and {k_pages.shape[3]} for the pages; the triton backend "
            f"takes multiples of {HEAD_DIMS.step} from {HEAD_DIMS.start} to {HEAD_DIMS[-1]}"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages are {k_pages.shape}, v_pages {v_pages.shape}; they must agree")
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} KV heads")
    if page_table.dtype != jnp.int32 or positions.dtype != jnp.int32 or positions.shape != (T,):
        raise ValueError(
            f"page_table is {page_table.dtype}, positions {positions.dtype}{positions.shape}; both "
            f"must be int32, with a position for each of {T} rows"
        )
