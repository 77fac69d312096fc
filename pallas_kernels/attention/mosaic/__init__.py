"""Attention by work list on Hopper, in Pallas Mosaic GPU."""

from rjax.pallas_kernels.attention.mosaic.backend import paged_attention, unmerged_attention
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import PackedPlan, pack_plan

__all__ = ["PackedPlan", "pack_plan", "paged_attention", "unmerged_attention"]
