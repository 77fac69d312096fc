"""The triton backend: its refusals, its tuning and its functions.

Triton is not installed everywhere: only a call of ``attention`` imports it.
"""

from rjax.pallas_kernels.attention.backend import AttentionBackend, AttentionShape, AttentionTuning
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.triton.config import BLOCK_M
from rjax.pallas_kernels.attention.triton.pack import pack_plan
from rjax.pallas_kernels.attention.triton.refusal import COMPUTE_CAPABILITIES, refusal


def tuning(shape: AttentionShape) -> AttentionTuning:
    """Tile and split sizes for a shape."""
    return AttentionTuning(
        tile_rows=BLOCK_M // shape.group_size,
        kv_split_size=512,
        fine_kv_split_size=512,
        fine_rows=0,
        split_policy=None,
        cost_model=CostModel(
            single_row_item=1.0, single_row_token=0.01, multi_row_item=1.2, multi_row_token=0.012
        ),
    )


def attention(*arguments, **options):
    """Call ``api.paged_attention``."""
    from rjax.pallas_kernels.attention.triton.api import paged_attention

    return paged_attention(*arguments, **options)


BACKEND = AttentionBackend(
    name="triton",
    compute_capabilities=COMPUTE_CAPABILITIES,
    refusal=refusal,
    tuning=tuning,
    prepare=lambda plan, positions, heads: pack_plan(plan, heads[:2]),
    attention=attention,
)
