"""Each kernel is chosen on its own: attention by another backend keeps no product from Mosaic."""

import pytest

from bench.decode_step.roofline import DecodeCase
from bench.machine_code.lowered_step import kernels_of, lowered_step
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict
from rjax.worker.backend import choose_backend

SHAPE = SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 2}


def _choose(name, config, page_size=64, **change):
    device = {"platform": "gpu", "compute_capability": 9.0} | change
    model = config_from_dict(config)
    return choose_backend(name, model=model, dtype=model.dtype, page_size=page_size, **device)


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("change", "page_size"), [({"head_dim": 48}, 64), ({}, 8)], ids=["head_dim", "page_size"]
)
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_products_are_of_mosaic_where_attention_is_not(change, page_size, quantization):
    config = SHAPE | change
    assert _choose("auto", config, page_size).name != "mosaic"
    lowered = lowered_step(config, DecodeCase(64, 0, 128), quantization, page_size=page_size)
    modules = b"".join(module for _, module in kernels_of(lowered))
    products = (b"gate_up", b"split_k") if quantization is None else (b"quantised",)
    assert all(name in modules for name in (*products, b"rope_and_cache"))
    assert b"paged_attention" not in modules


def test_a_step_in_float32_has_no_kernel_of_mosaic():
    lowered = lowered_step(
        SHAPE | {"dtype": "float32", "torch_dtype": "float32"}, DecodeCase(16, 0, 128)
    )
    assert not kernels_of(lowered)


def test_a_backend_by_name_has_no_kernels_of_another():
    names = {kernel.backend for kernel in _choose("xla", SHAPE).dispatcher.kernels}
    assert names == {"xla"}
    names = {kernel.backend for kernel in _choose("mosaic", SHAPE).dispatcher.kernels}
    assert names == {"mosaic", "xla"}


@pytest.mark.parametrize(("platform", "capability"), [("cpu", None), ("gpu", 8.0), ("gpu", 12.0)])
def test_other_devices_have_no_kernels_of_hopper(platform, capability):
    backend = _choose("auto", SHAPE, platform=platform, compute_capability=capability)
    assert {kernel.backend for kernel in backend.dispatcher.kernels} == {"xla"}
    assert not backend.dispatcher.exchanges_shares
