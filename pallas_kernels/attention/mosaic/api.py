"""The mosaic backend's entry point: checks, packing, attention kernel, relay fusion."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.attention.mosaic.config import (
    FP8_HEAD_DIMS,
    HEAD_DIMS,
    ROWS,
    TILE,
    KernelConfig,
    query_box,
    query_buffers,
    ring_slots,
)
from pallas_kernels.attention.mosaic.launch import attention_call
from pallas_kernels.attention.mosaic.pack import PackedPlan, pack_plan
from pallas_kernels.attention.options import apply_sinks, check_per_head
from pallas_kernels.attention.spec import AttentionSpec
from pallas_kernels.attention.work_list import AttentionPlan
from pallas_kernels.fp8 import Scales, check_scales
from pallas_kernels.mosaic_emit import multiprocessors
from pallas_kernels.relay_fusion.mosaic import merge_in_place


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
    programs: int | None = None,
    ping_pong: bool = True,
    early_launch: bool = True,
) -> tuple[Float[Array, "T N H"], Float[Array, "T N"]]:
    """Attention of packed query rows over paged KV, as the plan says; same contract as xla.

    Args:
        q: rotated queries, bfloat16 or float16.
        k_pages, v_pages: the pool, q's dtype or float8_e4m3fn; S is 16, 32, 64 or a multiple of 64.
        page_table: int32 page ids of each sequence; entries past its length are never used.
        positions: int32 absolute position of each row; negative for padding rows.
        plan: the work lists; pack it once a step with ``pack_plan`` where layers share it.
        spec: scale, cap and mask.
        alibi_slopes, sinks: float32, one a query head, as in the xla backend.
        k_scales, v_scales: float32 [K] or [P, K], of float8_e4m3fn pages, as in the xla backend;
            values times scales of pages are rounded to float16.
        programs: persistent programs to launch; None for one a multiprocessor.
        ping_pong: the consumer warpgroups of wide items take turns on the tensor cores.
        early_launch: launch while the kernel before still runs, and wait for it on the device.

    Returns:
        Output in q's dtype and natural-log LSE in float32; 0 and -inf for rows that see nothing,
        with sinks too.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    check_per_head(q.shape[1], sinks=sinks)
    call = _prepared(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        plan,
        spec,
        alibi_slopes=alibi_slopes,
        k_scales=k_scales,
        v_scales=v_scales,
        programs=programs,
        ping_pong=ping_pong,
        early_launch=early_launch,
    )
    return _launch(*call, sinks)


def unmerged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "P K S H"],
    v_pages: Float[Array, "P K S H"],
    page_table: Int[Array, "B M"],
    positions: Int[Array, " T"],
    plan: AttentionPlan | PackedPlan,
    spec: AttentionSpec,
    *,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "X N H"], Float32[Array, "X N"], Int[Array, " T1"]]:
    """``paged_attention`` before its relay fusion, for a kernel that merges what it reads.

    Returns:
        (out, part, part_lse, merge_indptr), as ``relay_fusion.mosaic.merge_in_place`` takes them:
        ``out`` holds the rows that have one partial result.
    """
    call = _prepared(
        q,
        k_pages,
        v_pages,
        page_table,
        positions,
        plan,
        spec,
        k_scales=k_scales,
        v_scales=v_scales,
    )
    return _launch_unmerged(*call)


def _prepared(
    q,
    k_pages,
    v_pages,
    page_table,
    positions,
    plan,
    spec: AttentionSpec,
    *,
    alibi_slopes=None,
    k_scales=None,
    v_scales=None,
    programs: int | None = None,
    ping_pong: bool = True,
    early_launch: bool = True,
):
    """The kernel's configuration and arguments, checked."""
    T, N, H = q.shape
    K, S = k_pages.shape[1:3]
    packed = plan if isinstance(plan, PackedPlan) else pack_plan(plan, positions, (N, K))
    assert isinstance(packed, PackedPlan)
    _check(q, k_pages, v_pages, page_table, positions, packed, spec)
    check_per_head(N, alibi_slopes=alibi_slopes)
    check_scales(k_pages, v_pages, k_scales, v_scales)
    boxes = (query_box(min(work.half_rows, T), N // K, H) for work in packed.lists)
    # Whole runs of eight rows, as the tensor cores read them.
    query_rows = max(ROWS, -(-max(boxes) * (N // K) // 8) * 8)
    buffers, itemsize = query_buffers(H), k_pages.dtype.itemsize
    cfg = KernelConfig(
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        soft_cap=spec.soft_cap,
        programs=programs or multiprocessors(),
        query_rows=query_rows,
        query_buffers=buffers,
        ring=ring_slots(H, query_rows, buffers, itemsize),
        ping_pong=ping_pong,
        early_launch=early_launch,
    )
    numbers = dict(alibi_slopes=alibi_slopes, k_scales=k_scales, v_scales=v_scales)
    numbers = {name: value for name, value in numbers.items() if value is not None}
    return cfg, packed, page_table, positions, q, k_pages, v_pages, numbers


# Compiled as a function of its own: a model's layers then share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=0)
def _launch(
    cfg: KernelConfig,
    packed: PackedPlan,
    page_table,
    positions,
    q,
    k_pages,
    v_pages,
    numbers,
    sinks,
):
    out, lse, part, part_lse = attention_call(
        cfg, packed, page_table, positions, q, k_pages, v_pages, numbers
    )
    out, lse = merge_in_place(out, lse, part, part_lse, packed.merge_indptr)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


@functools.partial(jax.jit, static_argnums=0)
def _launch_unmerged(cfg: KernelConfig, packed: PackedPlan, *arguments):
    out, _, part, part_lse = attention_call(cfg, packed, *arguments)
    return out, part, part_lse, packed.merge_indptr


def _check(q, k_pages, v_pages, page_table, positions, packed: PackedPlan, spec) -> None:
    T, N, H = q.shape
    P, K, S, _ = k_pages.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"q is {q.dtype}; the mosaic backend takes bfloat16 or float16")
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn) or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"pages are {k_pages.dtype} and {v_pages.dtype}; both must have q's dtype {q.dtype}, "
            "or both float8_e4m3fn"
        )
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages is {v_pages.shape}, k_pages {k_pages.shape}; they must be equal")
    head_dims = HEAD_DIMS if k_pages.dtype == q.dtype else FP8_HEAD_DIMS
    if k_pages.shape[3] != H or H not in head_dims:
        raise ValueError(
            f"head dim is {H} for q and {k_pages.shape[3]} for the pages; with {k_pages.dtype} "
            f"pages the mosaic backend takes {', '.join(map(str, head_dims))}"
        )
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} KV heads")
    if S not in (16, 32) and S % TILE:
        raise ValueError(f"pages of {S} tokens; the mosaic backend takes 16, 32 or multiples of 64")
    if not spec.scale > 0:
        raise ValueError(f"scale is {spec.scale}; the mosaic backend needs a positive one")
    if positions.shape[0] != T or packed.merge_indptr.shape[0] != T + 1:
        raise ValueError(
            f"{T} query rows, {positions.shape[0]} positions, a plan for "
            f"{packed.merge_indptr.shape[0] - 1} rows; they must agree"
        )
    if packed.heads != (N, K):
        raise ValueError(
            f"the plan is packed for (N, K) = {packed.heads}; q and pages have ({N}, {K})"
        )
    for work in packed.lists:
        if work.half_rows * (N // K) > ROWS:
            raise ValueError(
                f"a work list of {work.tile_rows} rows an item and {N // K} heads a group is "
                f"{work.tile_rows * (N // K)} matrix rows; the mosaic backend takes at most "
                f"{2 * ROWS}, with whole groups in each half"
            )
