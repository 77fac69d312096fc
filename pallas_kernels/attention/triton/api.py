"""Entry point of the triton backend: checks, packing, attention kernel, relay fusion."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.attention.backend import AttentionShape
from rjax.pallas_kernels.attention.options import apply_sinks, check_per_head
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.attention.relay_fusion.triton import merge_in_place
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.attention.triton.config import BLOCK_M, Tiling, tiling
from rjax.pallas_kernels.attention.triton.kernel import attention_kernel
from rjax.pallas_kernels.attention.triton.pack import PackedPlan, pack_plan
from rjax.pallas_kernels.attention.triton.refusal import shape_refusal
from rjax.pallas_kernels.fp8 import Scales, check_scales


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
        k_scales, v_scales: float32 [K] or [P, K], scales of float8_e4m3fn pages, as in the xla
            backend; probabilities times ``v_scales`` round to q's dtype.
        num_ctas: persistent CTAs to launch; None for a few times what the device holds at once.

    Returns:
        Output in q's dtype and natural-log LSE in float32; 0 and -inf for rows that see nothing,
        with sinks too.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
        ImportError: jax-triton, or the GPU support of jax that it needs, is not installed.
    """
    options = Options(alibi_slopes, k_scales, v_scales)
    operands = Operands(page_table, positions, q, k_pages, v_pages, options)
    _check(operands)
    check_per_head(q.shape[1], alibi_slopes=alibi_slopes, sinks=sinks)
    check_scales(k_pages, v_pages, k_scales, v_scales)
    config = tiling(q.shape[2])
    if num_ctas is not None:
        config = dataclasses.replace(config, num_ctas=num_ctas)
    return _launch(spec, config, _packed(plan, operands), operands, sinks)


class Options(NamedTuple):
    """Optional operands: float32 [N], and float32 [K] or [P, K] with fp8 pages; None for none."""

    alibi_slopes: Any
    k_scales: Any
    v_scales: Any


class Operands(NamedTuple):
    """Arrays of one attention call besides the plan; shapes as in ``paged_attention``."""

    page_table: Any
    positions: Any
    q: Any
    k_pages: Any
    v_pages: Any
    options: Options


# A jitted function of its own: the layers of a model share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(spec: AttentionSpec, config: Tiling, packed: PackedPlan, operands: Operands, sinks):
    """Run attention and relay fusion."""
    import jax_triton

    page_table, positions, q, k_pages, v_pages, options = operands
    T, N, H = q.shape
    K, S = k_pages.shape[1:3]
    fp8 = k_pages.dtype != q.dtype
    if fp8:  # Ampere has no such type: the kernel takes the bits
        k_pages, v_pages = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (k_pages, v_pages))
    unread = jnp.zeros(1, jnp.float32)
    results = jax_triton.triton_call(
        packed.blocks,
        packed.counts,
        page_table,
        positions,
        packed.destinations,
        q,
        k_pages,
        v_pages,
        *(unread if x is None else x for x in options),
        page_table.shape[1],
        kernel=attention_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((T, N, H), q.dtype),
            jax.ShapeDtypeStruct((T, N), jnp.float32),
            jax.ShapeDtypeStruct((packed.num_merge_entries, N, H), q.dtype),
            jax.ShapeDtypeStruct((packed.num_merge_entries, N), jnp.float32),
        ),
        grid=(min(config.num_ctas, packed.blocks.shape[0] * K),),
        num_warps=config.warps,
        num_stages=config.stages,
        N=N,
        K=K,
        H=H,
        S=S,
        SMALL_BLOCK_M=packed.small_block_m,
        BLOCK_M=BLOCK_M,
        KV_TILE=config.tokens,
        SCALE=float(spec.scale),
        WINDOW=spec.sliding_window or 0,
        SOFT_CAP=float(spec.soft_cap or 0),
        ALIBI=options.alibi_slopes is not None,
        FP8=fp8,
        SCALES_PER_PAGE=fp8 and options.k_scales.ndim == 2,
    )
    out, lse, partial_out, partial_lse = results
    out, lse = merge_in_place(out, lse, partial_out, partial_lse, packed.merge_indptr)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


def _packed(plan: AttentionPlan | PackedPlan, operands: Operands) -> PackedPlan:
    """The plan, packed and checked against the operands."""
    (T, N, _), K = operands.q.shape, operands.k_pages.shape[1]
    packed = plan if isinstance(plan, PackedPlan) else pack_plan(plan, (N, K))
    if packed.heads != (N, K) or packed.merge_indptr.shape[0] != T + 1:
        raise ValueError(
            f"the plan is packed for {packed.merge_indptr.shape[0] - 1} rows and (N, K) = "
            f"{packed.heads}; there are {T} rows and ({N}, {K})"
        )
    return packed


def _check(operands: Operands) -> None:
    """Raise ValueError for operands that the kernel does not take."""
    page_table, positions, q, k_pages, v_pages, _ = operands
    (T, N, H), (_, K, S, pages_H) = q.shape, k_pages.shape
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn) or k_pages.dtype != v_pages.dtype:
        raise ValueError(
            f"k_pages are {k_pages.dtype} and v_pages {v_pages.dtype}; both must have q's dtype, "
            f"{q.dtype}, or both be float8_e4m3fn"
        )
    if k_pages.shape != v_pages.shape:
        raise ValueError(f"k_pages are {k_pages.shape}, v_pages {v_pages.shape}; they must agree")
    if pages_H != H:
        raise ValueError(f"head dim is {H} for q and {pages_H} for the pages; they must be equal")
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} KV heads")
    if page_table.dtype != jnp.int32 or positions.dtype != jnp.int32 or positions.shape != (T,):
        raise ValueError(
            f"page_table is {page_table.dtype}, positions {positions.dtype}{positions.shape}; both "
            f"must be int32, with a position for each of {T} rows"
        )
    reason = shape_refusal(AttentionShape(N, K, H, q.dtype, S, k_pages.dtype))
    if reason is not None:
        raise ValueError(f"the triton backend cannot run this: {reason}")
