"""Quantised checkpoints that are wrong or hostile: one clear error, nothing on the devices."""

import gc
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from quantised_files import compressed, write_quantised
from safetensors.numpy import save_file
from test_quantised_loading import LLAMA

from rjax import models
from rjax.models.loading.tensors import read_tensors

UP = "model.layers.0.mlp.up_proj"
ATTENTION = "model.layers.0.self_attn"
GOLDEN_WITH_KV_SCALES = Path(__file__).parents[1] / "golden" / "quantised" / "ct-fp8-kv"


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect():
    """`refused` collects garbage twice; it passes over what earlier tests left alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder(request, tmp_path):
    return write_quantised(tmp_path, LLAMA, getattr(request, "param", "awq"))[0]


def refused(folder, message):
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(models.CheckpointError, match=message) as caught:
        models.load_model(folder, dtype="float32", progress=False)
    assert "\n" not in str(caught.value)
    del caught
    gc.collect()
    assert len(jax.live_arrays()) == before


def change_tensors(folder, edit):
    # safetensors' own loader for numpy does not know fp8.
    tensors = {name: entry.read() for name, entry in read_tensors(folder).items()}
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def set_one(name, value):
    def edit(tensors):
        tensors[name].ravel()[-1] = value

    return edit


def test_missing_scales(folder):
    change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.scales"))
    refused(folder, rf"lacks the tensor {UP}\.scales; the folder is incomplete")


def test_extra_scales(folder):
    change_tensors(
        folder, lambda tensors: tensors.update({f"{UP}.input_scale": np.ones(1, np.float32)})
    )
    refused(folder, rf"has the tensor {UP}\.input_scale, which LlamaForCausalLM does not use")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(folder, value):
    change_tensors(folder, set_one(f"{UP}.scales", value))
    refused(folder, rf"{UP}\.scales has scales that are not finite")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("w4a16", "weight_scale"),
        ("fp8-dynamic", "weight_scale"),
        ("w8a8", "weight_scale"),
        ("deepseek-fp8", "weight_scale_inv"),
        ("gptq", "scales"),
    ],
    indirect=["folder"],
)
def test_scales_that_are_zero(folder, name):
    change_tensors(folder, set_one(f"{UP}.{name}", 0))
    refused(folder, rf"{UP}\.{name} has scales that are zero")


@pytest.fixture
def folder_with_kv_scales(tmp_path):
    return shutil.copytree(GOLDEN_WITH_KV_SCALES, tmp_path / "kv")


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (0, "has scales that are zero"),
        (-0.01, "has scales that are negative"),
        (np.nan, "has scales that are not finite"),
        (np.inf, "has scales that are not finite"),
    ],
)
def test_values_of_kv_scales(folder_with_kv_scales, name, value, problem):
    change_tensors(folder_with_kv_scales, set_one(f"{ATTENTION}.{name}", value))
    refused(folder_with_kv_scales, rf"^model.safetensors: {ATTENTION}\.{name} {problem}$")


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (
            np.ones(2, np.float32),
            r"' of .* has the shape \(2,\); config.json means \(1,\) or \(\)$",
        ),
        (np.ones(1, np.int32), " has the type I32; the quantization_config means F32 or BF16"),
        (None, "; the folder is incomplete or config.json describes another model$"),
    ],
)
def test_kv_scales_that_do_not_fit(folder_with_kv_scales, scale, problem):
    def edit(tensors):
        del tensors[f"{ATTENTION}.k_scale"]
        if scale is not None:
            tensors[f"{ATTENTION}.k_scale"] = scale

    change_tensors(folder_with_kv_scales, edit)
    refused(folder_with_kv_scales, rf"{ATTENTION}\.k_scale{problem}")


def test_shapes_that_do_not_fit(folder):
    def cut(tensors):
        tensors[f"{UP}.qweight"] = np.ascontiguousarray(tensors[f"{UP}.qweight"][:, :-1])

    change_tensors(folder, cut)
    refused(folder, r"up_proj.qweight' .* the shape \(64, 23\); config.json means \(64, 24\)")


def test_another_group_size(folder):
    change_config(folder, lambda config: config.update(group_size=16))
    refused(folder, r"' of .* has the shape \(2, \d+\); config.json means \(4, \d+\)")


def test_groups_that_do_not_divide(folder):
    change_config(folder, lambda config: config.update(group_size=48))
    refused(folder, "has 64 outputs and 64 inputs; AWQ needs multiples of 8 and of the group_size")


def test_values_of_another_type(folder):
    def widen(tensors):
        tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].astype(np.int64)

    change_tensors(folder, widen)
    refused(folder, "up_proj.qweight has the type I64; the quantization_config means I32")


def test_the_other_float_of_8_bits(tmp_path):
    folder, _ = write_quantised(tmp_path, LLAMA, "fp8-dynamic")

    def other(tensors):
        tensors[f"{UP}.weight"] = tensors[f"{UP}.weight"].astype(ml_dtypes.float8_e5m2)

    change_tensors(folder, other)
    refused(folder, "up_proj.weight has the type F8_E5M2; the quantization_config means F8_E4M3")


@pytest.mark.parametrize("folder", ["gptq"], indirect=True)
def test_inputs_in_the_order_of_activations(folder):
    change_tensors(folder, set_one(f"{UP}.g_idx", 0))
    refused(folder, r"up_proj\.g_idx orders the inputs by activation \(desc_act")


NEEDS_ORDER = "; config.json has {} the group of each input$"


@pytest.mark.parametrize("folder", ["gptq"], indirect=True)
def test_an_order_of_activations_that_is_missing(folder):
    change_config(folder, lambda config: config.update(desc_act=True))
    models.load_model(folder, dtype="float32", progress=False)  # in the order of the inputs
    change_tensors(folder, lambda tensors: tensors.pop(f"{UP}.g_idx"))
    missing = NEEDS_ORDER.format("desc_act true, which needs")
    refused(folder, rf"lacks the tensor {UP}\.g_idx{missing}")
    own = {"+:.*mlp.*": {"desc_act": True}}
    change_config(folder, lambda config: config.update(desc_act=False, dynamic=own))
    refused(folder, rf"lacks the tensor {UP}\.g_idx{missing}")
    change_config(folder, lambda config: config.pop("dynamic"))
    models.load_model(folder, dtype="float32", progress=False)


@pytest.mark.parametrize("folder", ["w4a16"], indirect=True)
@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_an_actorder_without_its_groups(folder, order):
    def change(config):
        next(iter(config["config_groups"].values()))["weights"]["actorder"] = order

    change_config(folder, change)
    missing = NEEDS_ORDER.format("an actorder that needs")
    refused(folder, rf"lacks .*weight_g_idx.*{missing}")


@pytest.mark.parametrize("folder", ["gptq-symmetric", "awq-symmetric"], indirect=True)
def test_zero_points_of_a_symmetric_file(folder):
    change_tensors(folder, set_one(f"{UP}.qzeros", 0x12345678))
    refused(folder, r"up_proj\.qzeros has zero points")


@pytest.mark.parametrize("folder", ["w4a16"], indirect=True)
def test_the_shape_that_a_file_states(folder):
    change_tensors(
        folder, lambda t: t.update({f"{UP}.weight_shape": np.array([192, 65], np.int64)})
    )
    refused(folder, r"up_proj\.weight_shape says \(192, 65\); config.json means \(192, 64\)")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', which is not supported"),
        ({"quant_method": ["awq"]}, "which is not supported"),
        ({"quant_method": "awq", "bits": 3}, "has 3 bits; AWQ has 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": "x"}, "group_size is 'x'"),
        ({"quant_method": "gptq", "bits": 3}, "has 3 bits; supported are 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "has the format 'marlin'"),
        (
            {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "checkpoint_format": "gptq"},
            "checkpoint_format 'gptq' and the format 'gptq_v2'; they must be equal",
        ),
        ({"quant_method": "gptq", "bits": 4, "method": "qqq"}, "has the method 'qqq'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format true"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": "yes"}, "desc_act is 'yes'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"[": {}}}, "dynamic has 're:\\['"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "has the fmt 'e5m2'; only e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "expected two positive whole"),
        ({"quant_method": "fp8", "activation_scheme": "some"}, "activation_scheme 'some'"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "expected a list of module names"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), "'nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=3, type="int"), "weights of 3 bits"),
        (compressed("float-quantized", num_bits=4, type="float"), "weights of 4 bits"),
        (compressed("int-quantized", num_bits=4, type="int"), "int4 weights in the format"),
        (
            compressed("pack-quantized", num_bits=4, type="int", strategy="tensor_group"),
            "the strategy 'tensor_group'",
        ),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block"),
            "'block' and no block_structure",
        ),
        (
            compressed("float-quantized", num_bits=8, type="float") | {"ignore": ["re:["]},
            r"ignore has 're:\['",
        ),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="channel")
            | {"ignore": ["model.layers.0.mlp.up_proj"]},
            "quantises model.layers.0.mlp.gate_proj as fp8 and model.layers.0.mlp.up_proj as "
            "unquantised",
        ),
        (
            compressed("float-quantized", num_bits=8, type="float")
            | {"kv_cache_scheme": {"num_bits": 4, "type": "int"}},
            "kv_cache_scheme means",
        ),
    ],
)
def test_configs_that_are_refused(quantization, message):
    with pytest.raises(models.CheckpointError, match=message) as caught:
        models.config_from_dict(LLAMA | {"quantization_config": quantization})
    assert "\n" not in str(caught.value)
