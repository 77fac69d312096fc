"""AWQ: scales that keep the function of the layers and lower the error of quantising them."""

import jax.numpy as jnp
import numpy as np
import pytest
from forward import logits_of
from plain_checkpoints import FAMILY_CONFIGS, LLAMA, PROMPTS, write_plain, write_tensors
from safetensors.numpy import load_file

from rjax import models
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.quantising.awq import fold_scale, scale_inputs
from rjax.models.quantising.calibration import Calibration
from rjax.models.quantising.projections import LINEARS, shared_inputs

HELD_OUT = [(11 * i + 3) % 40 for i in range(40)]


def load(folder):
    return models.load_model(folder, dtype="float32", progress=False).model


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("family", FAMILY_CONFIGS)
def test_folded_scales_keep_the_function(tmp_path, family):
    values = FAMILY_CONFIGS[family]
    source = write_plain(tmp_path / "source", values, outliers=30.0)
    config = models.config_from_folder(source)
    tensors = load_file(source / "model.safetensors")
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    settings = choose_settings(config, "awq")
    calibration = Calibration(config, PROMPTS, tensors)
    for layer in range(config.num_layers):
        inputs = calibration.advance(layer, tensors)
        scale_inputs(shared_inputs(config, layer), tensors, dtypes, inputs, settings)
    folded = write_tensors(tmp_path / "folded", values, tensors)
    changed = {name for name in tensors if not np.array_equal(tensors[name], before[name])}
    assert any("norm" in name for name in changed)
    values_scaled = any(("o_proj" in name or "out_proj" in name) for name in changed)
    assert values_scaled == (config.num_heads == config.num_kv_heads)
    expected = logits_of(load(source), HELD_OUT)
    np.testing.assert_allclose(logits_of(load(folded), HELD_OUT), expected, rtol=2e-4, atol=2e-4)


def test_a_gelu_without_a_gate_is_not_scaled_through():
    for family, scaled in (("opt", True), ("opt with gelu", False)):
        config = models.config_from_dict(FAMILY_CONFIGS[family])
        assert bool(shared_inputs(config, 0)[3].rows) == scaled


@pytest.mark.sample(1)
@pytest.mark.parametrize("symmetric", [True, False])
def test_outlier_channels(tmp_path, symmetric):
    source = write_plain(tmp_path / "source", LLAMA, outliers=30.0)
    config = models.config_from_folder(source)
    expected = logits_of(load(source), HELD_OUT)
    errors = {}
    for scheme in ("int4", "awq"):
        settings = choose_settings(config, scheme, None, symmetric)
        quantise_checkpoint(source, tmp_path / scheme, settings, prompts=PROMPTS, progress=False)
        difference = logits_of(load(tmp_path / scheme), HELD_OUT) - expected
        errors[scheme] = np.linalg.norm(difference) / np.linalg.norm(expected)
    assert errors["awq"] < 0.8 * errors["int4"], errors


def test_norms_in_few_bits_are_allowed_for():
    """The rounding of norm / scale goes into the scale of the weights."""
    config = models.config_from_dict(LLAMA)
    group = shared_inputs(config, 0)[0]
    draw = np.random.default_rng(0)
    dtype = np.dtype(jnp.bfloat16)
    tensors = {group.norm[0]: draw.normal(1, 0.2, 64).astype(dtype)}
    tensors[group.norm[0]][7] = 0
    tensors |= {name: draw.normal(size=(32, 64)).astype(dtype) for name in group.tensors}
    before = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    scale = draw.uniform(0.3, 3, 64).astype(np.float32)
    used = fold_scale(group, scale, tensors, dict.fromkeys(tensors, dtype))
    np.testing.assert_allclose(np.delete(used, 7), np.delete(scale, 7), rtol=2**-8)
    assert used[7] == 1
    norm = tensors[group.norm[0]]
    assert norm.dtype == dtype
    for name in group.tensors:
        after = tensors[name] * norm.astype(np.float32)
        np.testing.assert_allclose(after, before[name] * before[group.norm[0]], rtol=3e-7)


def test_recorded_inputs_are_means_over_real_tokens(tmp_path):
    source = write_plain(tmp_path / "source", LLAMA)
    config = models.config_from_folder(source)
    tensors = load_file(source / "model.safetensors")
    together = Calibration(config, PROMPTS[:3], tensors)
    alone = [Calibration(config, [prompt], tensors) for prompt in PROMPTS[:3]]
    for layer in range(config.num_layers):
        found = together.advance(layer, tensors)
        parts = [one.advance(layer, tensors) for one in alone]
        counts = np.array([len(prompt) for prompt in PROMPTS[:3]])
        for name in LINEARS:
            for field in ("magnitudes", "products"):
                expected = sum(
                    count * np.asarray(getattr(part[name], field))
                    for count, part in zip(counts, parts, strict=True)
                )
                np.testing.assert_allclose(
                    getattr(found[name], field), expected / counts.sum(), rtol=1e-4, atol=1e-5
                )


@pytest.mark.thorough
def test_the_recorded_stream_is_the_models(tmp_path):
    """Inputs of the last projection, from which the output of the layer follows."""
    source = write_plain(tmp_path / "source", FAMILY_CONFIGS["mistral"])
    config = models.config_from_folder(source)
    tensors = load_file(source / "model.safetensors")
    calibration = Calibration(config, [PROMPTS[4]], tensors)
    for layer in range(config.num_layers):
        calibration.advance(layer, tensors)
    model = load(source)
    tokens = jnp.asarray(PROMPTS[4])
    hidden = model(tokens, jnp.arange(len(tokens)), models.DenseAttention())
    ((stream, mask),) = calibration._batches
    found = model.norm(jnp.asarray(stream[mask]))
    np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=1e-4)


def test_no_prompts():
    config = models.config_from_dict(LLAMA)
    with pytest.raises(ValueError, match="no prompts"):
        Calibration(config, [[]], {})
