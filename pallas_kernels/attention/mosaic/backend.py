"""The mosaic backend: its refusals, its tuning and its functions.

A call of ``paged_attention`` checks its operands, packs the plan, runs the kernel and merges the
partial results by relay fusion.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rjax.pallas_kernels.attention.backend import AttentionBackend, AttentionShape, AttentionTuning
from rjax.pallas_kernels.attention.mosaic.config import (
    CONSUMERS,
    FP8_HEAD_DIMS,
    HEAD_DIMS,
    KV_TILE,
    WGMMA_M,
    KernelConfig,
    num_kv_stages,
    num_q_stages,
    q_box_rows,
    split_head_parts,
)
from rjax.pallas_kernels.attention.mosaic.kernel import Operands, attention_call
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import PackedPlan, pack_plan
from rjax.pallas_kernels.attention.options import apply_sinks, check_per_head
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.attention.plan.work_list import AttentionPlan
from rjax.pallas_kernels.attention.relay_fusion.mosaic import merge_in_place, merge_rows
from rjax.pallas_kernels.attention.spec import AttentionSpec
from rjax.pallas_kernels.fp8 import Scales, check_scales
from rjax.pallas_kernels.kernel import DeviceInfo, supports
from rjax.pallas_kernels.mosaic.emit import num_sms
from rjax.pallas_kernels.pending import UnmergedAttention

_COMPUTE_CAPABILITIES = (9,)  # wgmma exists on Hopper only
_SMALL_PAGES = (16, 32)
_NUM_SMS = 128  # about those of a Hopper GPU: multi-row items mostly come in powers of two
_FINE_ROW_HEADS = 32  # rows times KV heads that fill the SMs only with fine splits


def refusal(shape: AttentionShape, device: DeviceInfo) -> str | None:
    """Why the kernels cannot serve this shape on this device, or None if they can."""
    if not supports(device, _COMPUTE_CAPABILITIES):
        return "it needs a Hopper GPU (compute capability 9.0)"
    return _shape_refusal(shape)


def _shape_refusal(shape: AttentionShape) -> str | None:
    """Why the kernels cannot serve this shape on any device, or None if they can."""
    if jnp.dtype(shape.dtype) not in (jnp.bfloat16, jnp.float16):
        return f"it takes dtype bfloat16 and float16, not {jnp.dtype(shape.dtype).name}"
    dims = FP8_HEAD_DIMS if shape.has_fp8_kv else HEAD_DIMS
    if shape.head_dim not in dims:
        allowed, given = ", ".join(map(str, dims)), ", with KV in fp8," if shape.has_fp8_kv else ""
        return f"it takes{given} head dims {allowed}, not {shape.head_dim}"
    if shape.page_size not in _SMALL_PAGES and shape.page_size % KV_TILE:
        return f"it takes pages of 16, 32 and multiples of 64 tokens, not {shape.page_size}"
    if shape.group_size > WGMMA_M:
        return f"it takes at most {WGMMA_M} query heads a KV head, not {shape.group_size}"
    return None


def tuning(shape: AttentionShape) -> AttentionTuning:
    """Tile and split sizes for a shape, measured on an H200 (``bench/kernels/README.md``)."""
    K = shape.num_kv_heads
    warpgroup_rows = WGMMA_M // shape.group_size
    split_head = split_head_parts(shape.head_dim) > 1
    head_pairs = K if split_head else -(-K // 2)
    return AttentionTuning(
        tile_rows=warpgroup_rows if split_head else CONSUMERS * warpgroup_rows,
        kv_split_size=256,
        fine_kv_split_size=64,
        fine_rows=_FINE_ROW_HEADS // K,
        split_policy=SplitPolicy(
            min_multi_row_items=-(-_NUM_SMS // K),
            # A CTA takes single-row items two heads at a time, and split heads one at a time.
            single_row_lanes=max(1, num_sms() // head_pairs),
            item_overhead=64,  # about the time to start, to finish and to merge an item
            # A CTA takes multi-row items one head at a time.
            multi_row_lanes=K // head_pairs,
            single_lane_rows=warpgroup_rows,
        ),
        # Microseconds: `python -m bench.kernels.cost_model` on an H200, 32 heads over 8 KV heads of
        # 128 dims. Other heads scale all four alike.
        cost_model=CostModel(
            single_row_item=0.055,
            single_row_token=0.00048,
            multi_row_item=0.28,
            multi_row_token=0.00097,
        ),
    )


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
    reason = _shape_refusal(AttentionShape(N, K, H, q.dtype, S, k_pages.dtype))
    if reason is not None:
        raise ValueError(f"the mosaic backend cannot run this: {reason}")
    check_per_head(N, alibi_slopes=options.get("alibi_slopes"))
    check_scales(k_pages, v_pages, options["k_scales"], options["v_scales"])
    given = {name: value for name, value in options.items() if value is not None}
    return Operands(page_table, positions, q, k_pages, v_pages, given)


def _packed(plan: AttentionPlan | PackedPlan, operands: Operands) -> PackedPlan:
    """The plan, packed and checked against the operands."""
    (T, N, H), K = operands.q.shape, operands.k_pages.shape[1]
    packed = plan
    if not isinstance(packed, PackedPlan):
        packed = pack_plan(packed, operands.positions, (N, K, H))
    assert isinstance(packed, PackedPlan)
    if packed.merge_indptr.shape[0] != T + 1:
        raise ValueError(
            f"{T} query rows and a plan for {packed.merge_indptr.shape[0] - 1} rows; they must "
            "agree"
        )
    if packed.heads != (N, K, H):
        raise ValueError(
            f"the plan is packed for (N, K, H) = {packed.heads}; q and pages have ({N}, {K}, {H})"
        )
    for work in packed.lists:
        if work.warpgroup_rows * (N // K) > WGMMA_M:
            raise ValueError(
                f"a work list of {work.tile_rows} rows an item and {N // K} heads a group is "
                f"{work.tile_rows * (N // K)} matrix rows; the mosaic backend takes at most "
                f"{2 * WGMMA_M}, with whole groups in each half, and {WGMMA_M} for split heads"
            )
    return packed


def _config(spec: AttentionSpec, packed: PackedPlan, operands: Operands) -> KernelConfig:
    """The kernel's static configuration, one CTA an SM."""
    if not spec.scale > 0:
        raise ValueError(f"scale is {spec.scale}; the mosaic backend needs a positive one")
    T, N, H = operands.q.shape
    G = N // operands.k_pages.shape[1]
    W = H // split_head_parts(H)
    boxes = (q_box_rows(min(work.warpgroup_rows, T), G, W) for work in packed.lists)
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


BACKEND = AttentionBackend(
    name="mosaic",
    compute_capabilities=_COMPUTE_CAPABILITIES,
    refusal=refusal,
    tuning=tuning,
    prepare=pack_plan,
    attention=paged_attention,
    unmerged_attention=unmerged_attention,
    merge=merge_rows,
)
