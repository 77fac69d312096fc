"""Quantising a checkpoint folder: what is written, for every family and scheme, and what is not."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from plain_checkpoints import (
    FAMILY_CONFIGS,
    LLAMA,
    PROMPTS,
    decoded,
    stored_tensors,
    write_plain,
    write_tensors,
)
from quantised_files import packed
from safetensors.numpy import load_file, save_file

from rjax import models
from rjax.models.quantising import SCHEMES, choose_settings, quantise_checkpoint
from rjax.models.quantising.rounding import quantise_weight
from rjax.models.quantising.settings import QuantisingSettings
from rjax.models.quantising.weight import QuantisedWeight
from tests.crossed import crossed

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised"
KINDS = [*(scheme for scheme in SCHEMES if scheme != "mxfp4"), "awq symmetric"]


def quantised(source, out, kind, **options):
    scheme, _, symmetric = kind.partition(" ")
    settings = choose_settings(models.config_from_folder(source), scheme, None, bool(symmetric))
    return quantise_checkpoint(source, out, settings, prompts=PROMPTS, progress=False, **options)


def load(folder):
    return models.load_model(folder, dtype="float32", progress=False)


def linears(model):
    found = nnx.iter_modules(model)
    return {path: linear for path, linear in found if isinstance(linear, models.Linear)}


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("family", "kind"), crossed(list(FAMILY_CONFIGS), KINDS, 5))
def test_the_folder_loads_as_the_weights_that_it_means(tmp_path, family, kind):
    values = FAMILY_CONFIGS[family]
    source = write_plain(tmp_path / "source", values)
    found = quantised(source, tmp_path / "out", kind)
    plain = write_tensors(tmp_path / "plain", values, decoded(tmp_path / "out"))
    ours, theirs = load(tmp_path / "out").model, load(plain).model
    names = {"fp8": "fp8", "int8": "int8"}
    for path, linear in linears(ours).items():
        assert linear.scheme.name == names.get(kind, "int4")
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32),
            linears(theirs)[path].weight_matrix(jnp.float32),
            str(path),
        )
    np.testing.assert_allclose(
        logits_of(ours, PROMPTS[3]), logits_of(theirs, PROMPTS[3]), rtol=1e-4, atol=1e-4
    )
    before = load(source).model
    difference = logits_of(ours, PROMPTS[3]) - logits_of(before, PROMPTS[3])
    limit = 0.2 if kind in names else 0.5
    assert np.linalg.norm(difference) < limit * np.linalg.norm(logits_of(before, PROMPTS[3]))
    tensors = stored_tensors(tmp_path / "out")
    assert found.bytes_after == sum(tensor.nbytes for tensor in tensors.values())
    fused = "model.layers.0.self_attn.qkv_proj"
    assert any(module.module == fused for module in found.modules) == (family == "phi3")


@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_reading_gives_what_quantising_computed(tmp_path, scheme):
    source = write_plain(tmp_path / "source", LLAMA)
    settings = choose_settings(models.config_from_folder(source), scheme)
    quantise_checkpoint(source, tmp_path / "out", settings, progress=False)
    weight = load_file(source / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    expected = quantise_weight(weight, settings, "float32").dequantised()
    found = load(tmp_path / "out").model.layers[1].mlp.down.weight_matrix(jnp.float32)
    np.testing.assert_array_equal(found, expected.T)


@pytest.mark.parametrize("outputs", [16, 13])
def test_packing(outputs):
    draw = np.random.default_rng(0)
    values = draw.integers(-8, 8, (outputs, 64)).astype(np.int8)
    zeros = draw.integers(-8, 8, (outputs, 2)).astype(np.int8)
    scale = np.ones((outputs, 2), ml_dtypes.bfloat16)
    tensors = QuantisedWeight(values, scale, zeros, packed=True).tensors("m")
    np.testing.assert_array_equal(tensors["m.weight_packed"], packed(values + 8, 1))
    np.testing.assert_array_equal(tensors["m.weight_zero_point"], packed(zeros + 8, 0))
    assert tensors["m.weight_shape"].tolist() == [outputs, 64]


def test_clipping_lowers_the_error():
    draw = np.random.default_rng(1)
    weight = draw.standard_t(4, (64, 256)).astype(np.float32)
    settings = QuantisingSettings("int4", 128)
    found = quantise_weight(weight, settings, "bfloat16").dequantised()
    grouped = weight.reshape(64, 2, 128)
    scale = np.abs(grouped).max(-1, keepdims=True) / 7
    nearest = (np.round(grouped / scale) * scale).reshape(weight.shape)
    assert np.square(found - weight).sum() < 0.9 * np.square(nearest - weight).sum()


@pytest.mark.parametrize(
    "weight", [np.zeros((8, 64)), np.full((8, 64), 1e-30), np.full((8, 64), -3.0)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_one_value(weight, symmetric):
    settings = QuantisingSettings("awq", 32, symmetric)
    found = quantise_weight(weight.astype(np.float32), settings, "float16")
    assert (found.scale != 0).all()
    np.testing.assert_allclose(found.dequantised(), weight, rtol=1e-3, atol=1e-20)


@pytest.mark.parametrize(
    ("kind", "golden"),
    [
        ("fp8", "ct-fp8-dynamic"),
        ("int8", "ct-w8a8"),
        ("int4", "ct-w4a16"),
        ("awq symmetric", "ct-w4a16"),
        ("awq", "ct-w4a16-asym"),
    ],
)
def test_config_is_that_of_the_library(tmp_path, kind, golden):
    source = write_plain(tmp_path / "source", LLAMA)
    quantised(source, tmp_path / "out", kind)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = found.pop("quantization_config")
    assert found == LLAMA
    expected = json.loads((GOLDEN / golden / "config.json").read_text())["quantization_config"]
    for config in (quantization, expected):
        del config["config_groups"]["group_0"]["weights"]["observer"]
    assert quantization == expected


@pytest.mark.thorough
def test_shards_and_repeated_runs(tmp_path):
    source = write_plain(tmp_path / "source", LLAMA)
    for out in ("a", "b"):
        quantised(source, tmp_path / out, "awq", shard_bytes=9_000)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "model.safetensors.index.json" in names and "model-00002-of-00008.safetensors" in names
    assert not any("partial" in name for name in names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    quantised(source, tmp_path / "whole", "awq")
    a, whole = (load(tmp_path / name).model for name in ("a", "whole"))
    np.testing.assert_array_equal(logits_of(a, PROMPTS[0]), logits_of(whole, PROMPTS[0]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_scales_and_norms_have_the_types_of_the_file(tmp_path, dtype):
    source = write_plain(tmp_path / "source", LLAMA)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: tensor.astype(dtype) for name, tensor in tensors.items()},
        source / "model.safetensors",
    )
    quantised(source, tmp_path / "out", "awq")
    found = load_file(tmp_path / "out" / "model.safetensors")
    scales = np.float32 if dtype is np.float64 else dtype
    assert found["model.layers.0.mlp.up_proj.weight_scale"].dtype == scales
    assert found["model.layers.0.input_layernorm.weight"].dtype == dtype
    load(tmp_path / "out")


def test_files_beside_the_weights(tmp_path):
    source = write_plain(tmp_path / "source", LLAMA)
    copied = ("tokenizer.json", "generation_config.json", "chat_template.jinja", "tokenizer.model")
    for name in (*copied, "quantize_config.json", "pytorch_model.bin.index.json", "notes.md"):
        (source / name).write_text(name)
    quantised(source, tmp_path / "out", "fp8")
    found = {path.name: path for path in (tmp_path / "out").iterdir()}
    assert found.keys() == {*copied, "config.json", "model.safetensors"}
    assert all(found[name].read_text() == name for name in copied)


@pytest.mark.parametrize(
    ("scheme", "group_size", "changes", "said"),
    [
        ("int4", 128, {}, "64, 96 inputs, which groups of 128 do not divide"),
        ("awq", None, {"intermediate_size": 90}, "64, 90 inputs, which groups of 128 nor 64 nor"),
    ],
)
def test_groups_that_do_not_divide(scheme, group_size, changes, said):
    config = models.config_from_dict(LLAMA | changes)
    with pytest.raises(models.CheckpointError, match=said):
        choose_settings(config, scheme, group_size)


def test_the_group_size_is_the_largest_that_divides():
    sizes = ((256, 384, 128), (256, 320, 64), (256, 352, 32))
    for hidden, intermediate, expected in sizes:
        changes = {"hidden_size": hidden, "head_dim": 64, "intermediate_size": intermediate}
        config = models.config_from_dict(LLAMA | changes)
        assert choose_settings(config, "int4").group_size == expected
        assert choose_settings(config, "fp8").group_size is None


def test_a_quantised_model_is_refused(tmp_path):
    source = write_plain(tmp_path / "source", LLAMA)
    quantised(source, tmp_path / "out", "fp8")
    with pytest.raises(models.CheckpointError, match="quantised already"):
        quantised(tmp_path / "out", tmp_path / "again", "fp8")


def test_the_output_must_be_empty_and_stays_so(tmp_path):
    source = write_plain(tmp_path / "source", LLAMA)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(models.CheckpointError, match="is not empty"):
        quantised(source, out, "fp8")
    (out / "mine").unlink()
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(models.CheckpointError, match=r"up_proj.*not finite"):
        quantised(source, out, "fp8")
    assert not any(out.iterdir())
    out.rmdir()
    out.touch()
    with pytest.raises(models.CheckpointError, match="is a file"):
        quantised(source, out, "fp8")


def test_wrong_settings():
    config = models.config_from_dict(LLAMA)
    for scheme, group_size in (("fp8", 32), ("int4", 48), ("mxfp4", 32)):
        with pytest.raises(ValueError, match="group_size is"):
            choose_settings(config, scheme, group_size)
