"""Entry points of the mosaic backend: checks, packing, attention kernel, relay fusion."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.attention.backend import AttentionShape
from rjax.pallas_kernels.attention.mosaic.config import (
    WGMMA_M,
    KernelConfig,
    num_kv_stages,
    num_q_stages,
    q_box_rows,
)
from rjax.pallas_kernels.attention.mosaic.launch import Operands, attention_call
from rjax.pallas_kernels.attention.mosaic.refusal import shape_refusal
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import PackedPlan, pack_plan
from rjax.pallas_kernels.attention.options import apply_sinks, check_per_head
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.attention.work_list import AttentionPlan
from rjax.pallas_kernels.fp8 import Scales, check_scales
from rjax.pallas_kernels.mosaic_emit import num_sms
from rjax.pallas_kernels.relay_fusion.mosaic import merge_in_place
from rjax.pallas_kernels.unmerged_attention import UnmergedAttention


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
    ping_pong: bool = True,
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
        k_scales, v_scales: float32 [K] or [P, K], scales of float8_e4m3fn pages, as in the xla
            backend; values times scales of pages are rounded to float16.
        num_ctas: persistent CTAs to launch; None for one an SM.
        ping_pong: the consumer warpgroups of a cooperative work tile take turns on the tensor
            cores.

    Returns:
        Output in q's dtype and natural-log LSE in float32; 0 and -inf for rows that see nothing,
        with sinks too.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    check_per_head(q.shape[1], sinks=sinks)
    options = dict(alibi_slopes=alibi_slopes, k_scales=k_scales, v_scales=v_scales)
    operands = _operands(q, k_pages, v_pages, page_table, positions, options)
    packed = _packed(plan, operands)
    cfg = _config(spec, packed, operands)
    cfg = dataclasses.replace(cfg, ping_pong=ping_pong)
    if num_ctas is not None:
        cfg = dataclasses.replace(cfg, num_ctas=num_ctas)
    return _launch(cfg, packed, operands, sinks)


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
) -> UnmergedAttention:
    """``paged_attention`` without relay fusion, for a kernel that merges partial results itself."""
    options = dict(k_scales=k_scales, v_scales=v_scales)
    operands = _operands(q, k_pages, v_pages, page_table, positions, options)
    packed = _packed(plan, operands)
    return _launch_unmerged(_config(spec, packed, operands), packed, operands)


def _operands(q, k_pages, v_pages, page_table, positions, options: dict[str, Any]) -> Operands:
    """The checked operands; options: ``alibi_slopes``, ``k_scales``, ``v_scales``, or None each."""
    T, N, H = q.shape
    if k_pages.dtype not in (q.dtype, jnp.float8_e4m3fn) or v_pages.dtype != k_pages.dtype:
        raise ValueError(
            f"pages are {k_pages.dtype} and {v_pages.dtype}; both must have q's dtype {q.dtype}, "
            "or both float8_e4m3fn"
        )
    if v_pages.shape != k_pages.shape:
        raise ValueError(f"v_pages is {v_pages.shape}, k_pages {k_pages.shape}; they must be equal")
    _, K, S, pages_H = k_pages.shape
    if pages_H != H:
        raise ValueError(f"head dim is {H} for q and {pages_H} for the pages; they must be equal")
    if N % K:
        raise ValueError(f"{N} query heads do not divide into {K} KV heads")
    if positions.shape[0] != T:
        raise ValueError(f"{T} query rows and {positions.shape[0]} positions; they must agree")
    reason = shape_refusal(AttentionShape(N, K, H, q.dtype, S, k_pages.dtype))
    if reason is not None:
        raise ValueError(f"the mosaic backend cannot run this: {reason}")
    check_per_head(N, alibi_slopes=options.get("alibi_slopes"))
    check_scales(k_pages, v_pages, options["k_scales"], options["v_scales"])
    given = {name: value for name, value in options.items() if value is not None}
    return Operands(page_table, positions, q, k_pages, v_pages, given)


def _packed(plan: AttentionPlan | PackedPlan, operands: Operands) -> PackedPlan:
    """The plan, packed and checked against the operands."""
    (T, N, _), K = operands.q.shape, operands.k_pages.shape[1]
    packed = plan
    if not isinstance(packed, PackedPlan):
        packed = pack_plan(packed, operands.positions, (N, K))
    assert isinstance(packed, PackedPlan)
    if packed.merge_indptr.shape[0] != T + 1:
        raise ValueError(
            f"{T} query rows and a plan for {packed.merge_indptr.shape[0] - 1} rows; they must "
            "agree"
        )
    if packed.heads != (N, K):
        raise ValueError(
            f"the plan is packed for (N, K) = {packed.heads}; q and pages have ({N}, {K})"
        )
    for work in packed.lists:
        if work.warpgroup_rows * (N // K) > WGMMA_M:
            raise ValueError(
                f"a work list of {work.tile_rows} rows an item and {N // K} heads a group is "
                f"{work.tile_rows * (N // K)} matrix rows; the mosaic backend takes at most "
                f"{2 * WGMMA_M}, with whole groups in each half"
            )
    return packed


def _config(spec: AttentionSpec, packed: PackedPlan, operands: Operands) -> KernelConfig:
    """The kernel's static configuration, one CTA an SM."""
    if not spec.scale > 0:
        raise ValueError(f"scale is {spec.scale}; the mosaic backend needs a positive one")
    T, N, H = operands.q.shape
    G = N // operands.k_pages.shape[1]
    boxes = (q_box_rows(min(work.warpgroup_rows, T), G, H) for work in packed.lists)
    q_rows = max(WGMMA_M, -(-max(boxes) * G // 8) * 8)  # whole swizzle atoms of eight rows
    q_stages = num_q_stages(H)
    return KernelConfig(
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        soft_cap=spec.soft_cap,
        num_ctas=num_sms(),
        q_rows=q_rows,
        q_stages=q_stages,
        kv_stages=num_kv_stages(H, q_rows, q_stages, operands.k_pages.dtype.itemsize),
        ping_pong=True,
    )


# A jitted function of its own: the layers of a model share one trace and one lowering.
@functools.partial(jax.jit, static_argnums=0)
def _launch(cfg: KernelConfig, packed: PackedPlan, operands: Operands, sinks):
    results = attention_call(cfg, packed, operands)
    out, lse = merge_in_place(*results, packed.merge_indptr)
    return (out, lse) if sinks is None else apply_sinks(out, lse, sinks)


@functools.partial(jax.jit, static_argnums=0)
def _launch_unmerged(cfg: KernelConfig, packed: PackedPlan, operands: Operands):
    out, _, partial_out, partial_lse = attention_call(cfg, packed, operands)
    return UnmergedAttention(out, partial_out, partial_lse, packed.merge_indptr)
