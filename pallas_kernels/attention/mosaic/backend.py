"""The mosaic backend: its refusals, its tuning and its functions."""

from rjax.pallas_kernels.attention.backend import AttentionBackend, AttentionShape, AttentionTuning
from rjax.pallas_kernels.attention.mosaic.api import paged_attention, unmerged_attention
from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, WGMMA_M
from rjax.pallas_kernels.attention.mosaic.refusal import COMPUTE_CAPABILITIES, refusal
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import pack_plan
from rjax.pallas_kernels.attention.planner import CostModel
from rjax.pallas_kernels.attention.split_policy import SplitPolicy
from rjax.pallas_kernels.mosaic_emit import num_sms
from rjax.pallas_kernels.relay_fusion.mosaic import merge_rows

_NUM_SMS = 128  # about those of a Hopper GPU: multi-row items mostly come in powers of two
_FINE_ROW_HEADS = 32  # rows times KV heads that fill the SMs only with fine splits


def tuning(shape: AttentionShape) -> AttentionTuning:
    """Tile and split sizes for a shape, measured on an H200 (``bench/kernels/README.md``)."""
    K = shape.num_kv_heads
    warpgroup_rows = WGMMA_M // shape.group_size
    head_pairs = -(-K // 2)
    return AttentionTuning(
        tile_rows=CONSUMERS * warpgroup_rows,
        kv_split_size=256,
        fine_kv_split_size=64,
        fine_rows=_FINE_ROW_HEADS // K,
        split_policy=SplitPolicy(
            min_multi_row_items=-(-_NUM_SMS // K),
            # A CTA takes single-row items two heads at a time.
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


BACKEND = AttentionBackend(
    name="mosaic",
    compute_capabilities=COMPUTE_CAPABILITIES,
    refusal=refusal,
    tuning=tuning,
    prepare=pack_plan,
    attention=paged_attention,
    unmerged_attention=unmerged_attention,
    merge=merge_rows,
)
