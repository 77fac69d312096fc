"""The xla backend: runs any shape on any device."""

from rjax.pallas_kernels.attention.backend import AttentionBackend, AttentionShape, AttentionTuning
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.xla.attention import paged_attention
from rjax.pallas_kernels.kernel import DeviceInfo

_TUNING = AttentionTuning(
    tile_rows=16,
    kv_split_size=128,
    fine_kv_split_size=128,
    fine_rows=0,
    split_policy=None,
    cost_model=CostModel(
        single_row_item=1.0, single_row_token=0.05, multi_row_item=2.0, multi_row_token=0.15
    ),
)


def refusal(shape: AttentionShape, device: DeviceInfo) -> str | None:
    """Always None."""
    return None


def tuning(shape: AttentionShape) -> AttentionTuning:
    """The same sizes for every shape."""
    return _TUNING


BACKEND = AttentionBackend(
    name="xla",
    compute_capabilities=None,
    refusal=refusal,
    tuning=tuning,
    prepare=lambda plan, positions, heads: plan,
    attention=paged_attention,
)
