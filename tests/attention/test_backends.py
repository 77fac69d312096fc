"""The registry of attention backends: what each one refuses, and its tuning."""

import dataclasses
import sys
import types

import pytest

from rjax.pallas_kernels.attention.backend import AttentionShape
from rjax.pallas_kernels.attention.plan.host import CostModel
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from rjax.pallas_kernels.attention.registry import BACKENDS
from rjax.pallas_kernels.kernel import DeviceInfo
from rjax.pallas_kernels.mosaic.emit import num_sms

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_size=64)
HOPPER, AMPERE, CPU = DeviceInfo("gpu", 9.0), DeviceInfo("gpu", 8.0), DeviceInfo("cpu", None)
FP8 = "float8_e4m3fn"
BY_NAME = {backend.name: backend for backend in BACKENDS}


@pytest.fixture
def jax_triton(monkeypatch):
    module = types.ModuleType("jax_triton")
    vars(module).update(__version__="0.3.1", __version_info__=(0, 3, 1))
    monkeypatch.setitem(sys.modules, "jax_triton", module)
    return module


def refusal(name, device=HOPPER, **change):
    return BY_NAME[name].refusal(dataclasses.replace(SHAPE, **change), device)


def test_preference_order():
    assert [backend.name for backend in BACKENDS] == ["mosaic", "triton", "xla"]


@pytest.mark.parametrize(
    ("device", "names"),
    [
        (HOPPER, ["mosaic", "triton", "xla"]),
        (AMPERE, ["triton", "xla"]),
        (DeviceInfo("gpu", 8.9), ["triton", "xla"]),
        (DeviceInfo("gpu", 7.5), ["xla"]),
        (DeviceInfo("gpu", 12.0), ["xla"]),
        (DeviceInfo("gpu", None), ["xla"]),
        (CPU, ["xla"]),
    ],
)
def test_devices(jax_triton, device, names):
    assert [backend.name for backend in BACKENDS if backend.runs_on(device)] == names
    assert [backend.name for backend in BACKENDS if not backend.refusal(SHAPE, device)] == names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": CPU}, "it needs a Hopper GPU (compute capability 9.0)"),
        ({"dtype": "float32"}, "it takes dtype bfloat16 and float16, not float32"),
        ({"head_dim": 48}, "it takes head dims 64, 80, 96, 112, 128, 192, 256, 512, not 48"),
        (
            {"head_dim": 80, "kv_dtype": FP8},
            "it takes, with KV in fp8, head dims 64, 96, 128, 192, 256, 512, not 80",
        ),
        ({"page_size": 8}, "it takes pages of 16, 32 and multiples of 64 tokens, not 8"),
        ({"page_size": 96}, "it takes pages of 16, 32 and multiples of 64 tokens, not 96"),
        (
            {"num_heads": 65, "num_kv_heads": 1},
            "it takes at most 64 query heads a KV head, not 65",
        ),
        ({"head_dim": 512, "kv_dtype": FP8}, None),
        ({"head_dim": 80}, None),
        ({"head_dim": 512, "num_heads": 16, "num_kv_heads": 1}, None),
        ({"page_size": 16, "dtype": "float16"}, None),
        ({"page_size": 192, "kv_dtype": FP8}, None),
        ({"num_heads": 64, "num_kv_heads": 1}, None),
    ],
)
def test_mosaic_refusals(change, reason):
    assert refusal("mosaic", **change) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"device": CPU},
            "it needs an Ampere, Ada or Hopper GPU (compute capability 8.0 to 9.0)",
        ),
        ({"dtype": "float32"}, "it takes dtype bfloat16 and float16, not float32"),
        ({"head_dim": 40}, "it takes head dims from 16 to 256 in steps of 16, not 40"),
        (
            {"num_heads": 65, "num_kv_heads": 1},
            "it takes at most 64 query heads a KV head, not 65",
        ),
        ({"page_size": 8, "head_dim": 80, "kv_dtype": FP8}, None),
    ],
)
def test_triton_refusals(jax_triton, change, reason):
    assert refusal("triton", **{"device": AMPERE} | change) == reason


def test_triton_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    reason = refusal("triton")
    assert reason is not None
    assert reason.startswith("jax-triton cannot be imported (")
    assert reason.endswith('; run: pip install "jax-triton<0.4"')


def test_triton_names_versions_that_it_cannot_call(jax_triton):
    vars(jax_triton).update(__version__="0.4.1", __version_info__=(0, 4, 1))
    assert refusal("triton") == (
        'jax-triton is 0.4.1, which is called otherwise; run: pip install "jax-triton<0.4"'
    )


def test_xla_refuses_nothing():
    assert refusal("xla", CPU, dtype="float32", head_dim=7, page_size=3) is None


@pytest.mark.parametrize(
    ("heads", "tile_rows", "fine_rows", "policy"),
    [
        ((32, 8), 32, 4, (16, 4, 2, 16)),
        ((8, 8), 128, 4, (16, 4, 2, 64)),
        ((14, 2), 18, 16, (64, 1, 2, 9)),
        ((16, 1), 8, 32, (128, 1, 1, 4)),
        ((9, 3), 42, 10, (43, 2, 1, 21)),
    ],
)
def test_mosaic_tuning(heads, tile_rows, fine_rows, policy):
    min_multi_row_items, pairs, multi_row_lanes, single_lane_rows = policy
    N, K = heads
    tuning = BY_NAME["mosaic"].tuning(dataclasses.replace(SHAPE, num_heads=N, num_kv_heads=K))
    assert (tuning.tile_rows, tuning.fine_rows) == (tile_rows, fine_rows)
    assert (tuning.kv_split_size, tuning.fine_kv_split_size) == (256, 64)
    assert tuning.split_policy == SplitPolicy(
        min_multi_row_items=min_multi_row_items,
        single_row_lanes=num_sms() // pairs,
        item_overhead=64,
        multi_row_lanes=multi_row_lanes,
        single_lane_rows=single_lane_rows,
    )
    assert tuning.cost_model == CostModel(0.055, 0.00048, 0.28, 0.00097)


def test_split_heads_tuning():
    """An item of heads of 512 dims is 64 matrix rows, and a CTA takes one KV head of it."""
    tuning = BY_NAME["mosaic"].tuning(
        dataclasses.replace(SHAPE, num_heads=32, num_kv_heads=4, head_dim=512)
    )
    assert tuning.tile_rows == 8
    policy = tuning.split_policy
    assert policy is not None
    assert (policy.single_row_lanes, policy.multi_row_lanes) == (num_sms() // 4, 1)
    assert policy.single_lane_rows == 8


def test_triton_tuning():
    tuning = BY_NAME["triton"].tuning(SHAPE)
    assert (tuning.tile_rows, tuning.kv_split_size, tuning.fine_kv_split_size) == (16, 512, 512)
    assert (tuning.fine_rows, tuning.split_policy) == (0, None)
    assert tuning.cost_model == CostModel(1.0, 0.01, 1.2, 0.012)


def test_xla_tuning():
    tuning = BY_NAME["xla"].tuning(SHAPE)
    assert (tuning.tile_rows, tuning.kv_split_size, tuning.fine_kv_split_size) == (16, 128, 128)
    assert (tuning.fine_rows, tuning.split_policy) == (0, None)
    assert tuning.cost_model == CostModel(1.0, 0.05, 2.0, 0.15)


def test_only_mosaic_leaves_results_unmerged():
    assert [backend.name for backend in BACKENDS if backend.unmerged_attention] == ["mosaic"]
