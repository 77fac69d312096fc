"""Checkpoints written by the libraries that define the formats, and what these libraries read."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rjax import models
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import split_parameter
from rjax.models.loading.tensors import read_tensors

FOLDER = Path(__file__).parents[1] / "golden" / "quantised"
REFUSED = {"gptq-desc-act": r"g_idx orders the inputs by activation \(desc_act"}
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())


def load(name, **options):
    options = {"dtype": "float32", "progress": False} | options
    return models.load_model(FOLDER / name, **options)


def test_there_are_goldens():
    assert len(NAMES) >= 12 and REFUSED.keys() <= set(NAMES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_weights_and_logits_are_the_librarys(name):
    loaded = load(name)
    expected = load_file(FOLDER / name / "expected.safetensors")
    config = loaded.config
    pieces = FAMILIES[config.architecture].weights(config)
    quantised = 0
    for path, linear in nnx.iter_modules(loaded.model):
        if not isinstance(linear, models.Linear):
            continue
        quantised += linear.scheme.name != "unquantised"
        weight = np.asarray(linear.weight_matrix(jnp.float32))
        weight = weight.reshape(*linear.input_shape, *linear.output_shape)
        letters = f"{linear.inputs} {linear.outputs}"
        key = ".".join(map(str, path)) + ".weight"
        for piece, part in split_parameter(weight, letters, pieces[key], config):
            rows = part[:: expected["row_stride"]]
            np.testing.assert_array_equal(rows, expected[piece.tensor], piece.tensor)
    assert quantised
    tokens = jnp.asarray(expected["tokens"].ravel(), jnp.int32)
    hidden = loaded.model(tokens, jnp.arange(tokens.size), models.DenseAttention())
    logits = expected["logits"].reshape(tokens.size, -1)
    np.testing.assert_allclose(loaded.model.logits(hidden), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    with pytest.raises(models.CheckpointError, match=REFUSED[name]) as caught:
        load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_shapes_and_types_of_kv_scales(shape, dtype, tmp_path):
    folder = shutil.copytree(FOLDER / "ct-fp8-kv", tmp_path / "kv")
    tensors = {name: entry.read() for name, entry in read_tensors(folder).items()}
    for name, value in (("k_scale", 0.25), ("v_scale", 3.0)):
        tensors[f"model.layers.0.self_attn.{name}"] = np.full(shape, value, dtype)
    save_file(tensors, folder / "model.safetensors")
    attention = load(folder).model.layers[0].attention
    for scale, value in ((attention.k_scale, 0.25), (attention.v_scale, 3.0)):
        assert scale[...].dtype == jnp.float32
        assert scale[...].tolist() == [value]
