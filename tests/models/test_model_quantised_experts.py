"""Quantised experts: every format against the weights that the file means, schemes, sharding."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from mxfp4_files import packed, write_mxfp4
from plain_checkpoints import LLAMA, decoded, write_plain, write_tensors
from quantised_files import FORMATS, write_quantised
from safetensors.numpy import load_file, save_file
from test_model_experts import GPT_OSS, problem, reference

from rjax import models
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.schemes import MXFP4, ON_LOAD, UNQUANTISED, Scaled
from rjax.pallas_kernels.experts.base import experts
from rjax.pallas_kernels.gemm.activation import Activation

QWEN2_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def load(folder, **options):
    return models.load_model(folder, **{"dtype": "float32", "progress": False} | options)


def grouped(model):
    found = nnx.iter_modules(model)
    linears = {path: each for path, each in found if isinstance(each, models.Linear)}
    return {path: each for path, each in linears.items() if each.num_experts}


def whole(linear):
    """[J, inputs, outputs] in float32."""
    return np.asarray(linear.weight_matrix(jnp.float32))


@pytest.mark.sample(8, 3)
@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_that_the_file_means(tmp_path, name, dequantize):
    quantised, plain = write_quantised(tmp_path, QWEN2_MOE, name)
    found, expected = load(quantised, dequantize=dequantize), load(plain)
    theirs = grouped(expected.model)
    assert len(theirs) == 4
    for path, linear in grouped(found.model).items():
        assert (linear.scheme == UNQUANTISED) == dequantize
        np.testing.assert_array_equal(whole(linear), whole(theirs[path]), str(path))
    shared = found.model.layers[0].mlp.shared
    assert (shared.up.scheme == UNQUANTISED) == dequantize
    for name in ("router", "shared.gate"):
        for model in (found.model, expected.model):
            mlp = model.layers[1].mlp
            value = mlp.router if name == "router" else mlp.shared.gate
            if model is found.model:
                kept = value[...]
        np.testing.assert_array_equal(kept, value[...])


@pytest.mark.parametrize("name", ["fp8-dynamic", "w4a16", "deepseek-fp8"])
def test_the_modules_that_the_file_ignores_stay_as_they_are(tmp_path, name):
    quantised, plain = write_quantised(tmp_path, QWEN2_MOE, name)
    config = models.config_from_dict(
        QWEN2_MOE
        | {
            "quantization_config": FORMATS[name][0]
            | {
                "ignore": ["lm_head", "re:.*mlp.experts.*"],
                "modules_to_not_convert": ["re:.*mlp.experts.*"],
            }
        }
    )
    schemes = dict(config.schemes)
    assert "layers.0.mlp.up" not in schemes and "layers.0.mlp.shared.up" in schemes


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("values", [QWEN2_MOE, GPT_OSS | {"dtype": "float32"}], ids=["each", "one"])
@pytest.mark.parametrize("name", ON_LOAD)
def test_experts_are_quantised_on_load(tmp_path, values, name):
    folder = write_plain(tmp_path / "plain", values)
    found, expected = load(folder, quantization=name), load(folder)
    theirs = grouped(expected.model)
    tolerance = {"fp8": 2**-4, "int8": 2**-7, "int4": 2**-3, "mxfp4": 0.2}[name]
    for path, linear in grouped(found.model).items():
        ours, wanted = whole(linear), whole(theirs[path])
        assert linear.scheme == ON_LOAD[name]
        assert linear.weight_bytes < 0.4 * theirs[path].weight_bytes
        # Of each channel, or group of inputs, the largest value sets the step.
        axes = (1,)
        limit = tolerance * np.abs(wanted).max(axes, keepdims=True)
        assert (np.abs(ours - wanted) <= limit).all()
        assert np.abs(ours - wanted).max() > 0
    projection = found.model.layers[0].attention.qkv
    assert projection.scheme == (UNQUANTISED if name == "mxfp4" else ON_LOAD[name])


def test_a_fused_checkpoint_is_quantised_on_load(tmp_path):
    from test_model_experts import GOLDENS

    folder = GOLDENS / "models" / "qwen3_moe_j16_k8_fused"
    found, expected = load(folder, quantization="int8"), load(folder)
    for path, linear in grouped(found.model).items():
        wanted = whole(grouped(expected.model)[path])
        limit = np.abs(wanted).max(1, keepdims=True) / 127
        assert (np.abs(whole(linear) - wanted) <= limit).all()


@pytest.mark.parametrize("dequantize", [False, True])
def test_mxfp4_stays_as_it_is_stored(tmp_path, dequantize):
    folder, exact = write_mxfp4(tmp_path, GPT_OSS)
    found, wanted = load(folder, dequantize=dequantize), load(exact)
    for path, linear in grouped(found.model).items():
        theirs = grouped(wanted.model)[path]
        assert linear.scheme == (UNQUANTISED if dequantize else MXFP4)
        np.testing.assert_array_equal(whole(linear), whole(theirs))
        if not dequantize:
            assert linear.weight_bytes * 32 == theirs.weight_bytes / 4 * 17
    qkv = found.model.layers[0].attention.qkv
    assert qkv.scheme == UNQUANTISED


def test_the_weights_of_mxfp4_are_quantised_to_themselves(tmp_path):
    folder, exact = write_mxfp4(tmp_path, GPT_OSS)
    found, wanted = load(exact, quantization="mxfp4"), load(folder)
    for path, linear in grouped(found.model).items():
        theirs = grouped(wanted.model)[path]
        assert linear.scheme == theirs.scheme == MXFP4
        assert linear.leaves.keys() == theirs.leaves.keys()
        for name, leaf in linear.leaves.items():
            np.testing.assert_array_equal(leaf, theirs.leaves[name], f"{path} {name}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_mxfp4_is_saved_as_quantised_while_loading(tmp_path, dtype):
    tensors = load_file(write_plain(tmp_path / "random", GPT_OSS) / "model.safetensors")
    source = write_tensors(
        tmp_path / "source", GPT_OSS, {name: one.astype(dtype) for name, one in tensors.items()}
    )
    settings = choose_settings(models.config_from_folder(source), "mxfp4")
    written = quantise_checkpoint(source, tmp_path / "out", settings, progress=False)
    assert [one.module for one in written.modules] == [
        f"model.layers.{layer}.mlp.experts.{name}"
        for layer in range(2)
        for name in ("gate_up_proj", "down_proj")
    ]
    saved, rounded = load(tmp_path / "out"), load(source, quantization="mxfp4")
    assert all(linear.scheme == MXFP4 for linear in grouped(saved.model).values())
    leaves, wanted = (jax.tree.leaves_with_path(nnx.state(each.model)) for each in (saved, rounded))
    for (path, leaf), (other, expected) in zip(leaves, wanted, strict=True):
        assert path == other
        np.testing.assert_array_equal(leaf, expected, jax.tree_util.keystr(path))
    before = load(source).model
    errors = {one.module: one.relative_error for one in written.modules}
    for (_, layer, _, name), linear in grouped(saved.model).items():
        plain = whole(grouped(before)["layers", layer, "mlp", name])
        error = np.linalg.norm(whole(linear) - plain) / np.linalg.norm(plain)
        module = (
            f"model.layers.{layer}.mlp.experts.{'gate_up_proj' if name == 'up' else 'down_proj'}"
        )
        assert errors[module] == pytest.approx(error, rel=1e-3)


def test_mxfp4_is_saved_for_experts_in_one_tensor_only(tmp_path):
    config = models.config_from_folder(write_plain(tmp_path / "plain", QWEN2_MOE))
    with pytest.raises(models.CheckpointError, match="cannot store: their format is that of gpt-o"):
        choose_settings(config, "mxfp4")


def test_mxfp4_is_not_saved_of_values_that_are_not_finite(tmp_path):
    source = write_plain(tmp_path / "source", GPT_OSS)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj"][2, 3, 5] = np.inf
    save_file(tensors, source / "model.safetensors")
    settings = choose_settings(models.config_from_folder(source), "mxfp4")
    with pytest.raises(models.CheckpointError, match=r"down_proj.*not finite"):
        quantise_checkpoint(source, tmp_path / "out", settings, progress=False)


@pytest.mark.parametrize("sizes", [{"moe_intermediate_size": 48}, {"hidden_size": 72}])
def test_inputs_that_are_no_whole_groups_are_refused(tmp_path, sizes):
    folder = write_plain(tmp_path / "plain", QWEN2_MOE | sizes)
    [size] = sizes.values()
    with pytest.raises(models.CheckpointError, match=f"is {size}, no multiple of it; choose one"):
        load(folder, quantization="mxfp4")


@pytest.mark.parametrize("values", [LLAMA, QWEN2_MOE | {"mlp_only_layers": [0, 1]}])
def test_mxfp4_is_refused_without_experts(tmp_path, values):
    folder = write_plain(tmp_path / "plain", values)
    with pytest.raises(models.CheckpointError, match=r"has none; choose one of fp8, int8, int4$"):
        load(folder, quantization="mxfp4")


@pytest.mark.parametrize(
    ("exponent", "message"), [(255, "not numbers"), (129, r"the scale 2\*\*2")]
)
def test_scales_of_mxfp4_that_no_kernel_takes_are_refused(tmp_path, exponent, message):
    def change(tensors):
        tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 0] = exponent

    folder, _ = write_mxfp4(tmp_path, GPT_OSS, change)
    with pytest.raises(models.CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("lost", ["down_proj_scales", "gate_up_proj_blocks"])
def test_a_tensor_that_mxfp4_lacks_is_named(tmp_path, lost):
    name = f"model.layers.1.mlp.experts.{lost}"
    folder, _ = write_mxfp4(tmp_path, GPT_OSS, lambda tensors: tensors.pop(name))
    with pytest.raises(models.CheckpointError, match=lost):
        load(folder)


def test_a_wrong_shape_is_named(tmp_path):
    def change(tensors):
        name = "model.layers.0.mlp.experts.down_proj_scales"
        tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])

    folder, _ = write_mxfp4(tmp_path, GPT_OSS, change)
    with pytest.raises(models.CheckpointError, match=r"down_proj_scales.*has the shape"):
        load(folder)


_PROGRAM = """
import sys
import jax, numpy as np
from flax import nnx
from rjax import models

folder, quantization = sys.argv[1], sys.argv[2] or None

def leaves(devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))
    options = {"quantization": quantization, "dtype": "float32", "progress": False}
    model = models.load_model(folder, mesh=mesh, **options).model
    linears = [m for _, m in nnx.iter_modules(model) if isinstance(m, models.Linear)]
    return [(m, dict(m.leaves)) for m in linears if m.num_experts]

for (_, one), (module, two) in zip(leaves(1), leaves(2), strict=True):
    assert not module.weight[...].sharding.is_fully_replicated
    for name, leaf in two.items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(one[name]), name)
"""


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", ["fp8-dynamic", "w4a16", "int8 on load", "mxfp4"])
def test_a_mesh_has_the_same_weights(tmp_path, name):
    wide, on_load = QWEN2_MOE | {"moe_intermediate_size": 64}, ""
    if name == "mxfp4":
        sizes = {"intermediate_size": 64, "num_key_value_heads": 2}
        folder, _ = write_mxfp4(tmp_path, GPT_OSS | sizes)
    elif name == "int8 on load":
        folder, on_load = write_plain(tmp_path / "plain", wide), "int8"
    else:
        folder, _ = write_quantised(tmp_path, wide, name)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), on_load],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


SCHEMES = {
    "fp8 of channels": Scaled("fp8"),
    "fp8 of blocks": Scaled("fp8", (16, 32)),
    "int8": Scaled("int8"),
    "int4": Scaled("int4", (1, 32), scale_dtype="bfloat16"),
    "mxfp4": MXFP4,
}


def stored(weight, scheme, a):
    """The leaves [J, ...] of random values, and the weight [J, inputs, ...] that they mean.

    weight: [J, inputs, outputs] gives the shape; a: entries of the axis A.
    """
    J, inputs, outputs = weight.shape
    leaves, meant = [], []
    for j in range(J):
        if scheme.values == "mxfp4":
            blocks, exponents, exact = packed(weight[j].T[None])
            codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(1, outputs, inputs)[0]
            signed = np.where(codes > 7, codes.astype(np.int8) - 16, codes)
            own = {"weight": jnp.asarray(signed, jnp.int4), "weight_scale": exponents[0]}
        else:
            rows, columns = scheme.block
            own = scheme.quantise(jnp.asarray(weight[j].T), (rows, columns or inputs))
            value = np.asarray(own["weight"], np.float32)
            scale = np.asarray(own["weight_scale"], np.float32)
            scale = scale[:, None] if scale.ndim == 1 else scale
            for axis in range(2):
                scale = scale.repeat(value.shape[axis] // scale.shape[axis], axis)
            exact = (value * scale)[None]
        leaves.append(own)
        meant.append(exact[0].T)
    plain = {name: jnp.stack([own[name] for own in leaves]) for name in leaves[0]}
    if a > 1:
        plain = {n: v.reshape(J, a, -1, *v.shape[2:]) for n, v in plain.items()}
    arranged = jax.vmap(scheme.for_experts.arrange)(plain)
    return arranged, np.stack(meant).reshape(J, inputs, *[a] * (a > 1), -1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SCHEMES)
def test_products_are_those_of_the_dequantised_weights(name):
    scheme, T, J, X, D, F = SCHEMES[name], 9, 5, 2, 64, 32
    h, chosen, weights, up, down = problem(T, J, X, D, F)
    up_leaves, up = stored(up.reshape(J, D, 2 * F), scheme, 2)
    down_leaves, down = stored(down, scheme, 1)
    assert scheme.for_experts.is_interleaved((D,)) == (name != "int8")
    dequantise = scheme.for_experts.dequantise
    run = functools.partial(
        experts,
        activation=Activation("silu", gated=True),
        widen_up=lambda leaves: dequantise(leaves, D, jnp.float32).reshape(D, 2, F),
        widen_down=lambda leaves: dequantise(leaves, F, jnp.float32),
    )
    found = jax.jit(run)(h, chosen, weights, up_leaves, down_leaves)
    wanted = reference(h, chosen, weights, up, down)
    np.testing.assert_allclose(found.reduce(), wanted, rtol=2e-5, atol=2e-5)


def test_scales_of_blocks_have_the_inputs_first():
    sizes = {"J": 4, "D": 256, "A": 2, "I": 128}
    leaves = Scaled("fp8", (128, 128)).for_experts.leaves("D", "A I", sizes)
    assert leaves["weight"].of_experts.letters == "J A I D"
    assert leaves["weight_scale"].of_experts.letters == "J D A I"
    leaves = Scaled("fp8").for_experts.leaves("D", "A I", sizes)
    assert leaves["weight_scale"].of_experts.letters == "J A I"


@pytest.mark.thorough
def test_dummy_weights_of_every_scheme():
    config = models.config_from_dict(GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}})
    model = models.init_model(config, dtype=jnp.bfloat16)
    for linear in grouped(model).values():
        assert linear.scheme == MXFP4
        assert 0.01 < whole(linear).std() < 0.04
    for scheme in SCHEMES.values():
        schemes = tuple((f"layers.{i}.mlp.{n}", scheme) for i in range(2) for n in ("up", "down"))
        plain = models.config_from_dict(QWEN2_MOE)
        model = models.init_model(dataclasses.replace(plain, schemes=schemes))
        for linear in grouped(model).values():
            assert 0.01 < whole(linear).std() < 0.04


@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
def test_a_quantised_checkpoint_means_what_the_folder_says(tmp_path, scheme):
    folder = write_plain(tmp_path / "plain", QWEN2_MOE)
    settings = choose_settings(models.config_from_dict(QWEN2_MOE), scheme)
    out = tmp_path / "out"
    quantise_checkpoint(folder, out, settings, progress=False)
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [
        "lm_head",
        *(f"model.layers.{i}.mlp.{n}" for i in range(2) for n in ("gate", "shared_expert_gate")),
    ]
    meant = write_tensors(tmp_path / "meant", QWEN2_MOE, decoded(out))
    found, expected = load(out), load(meant)
    for path, linear in grouped(found.model).items():
        assert linear.scheme.name == scheme
        np.testing.assert_array_equal(whole(linear), whole(grouped(expected.model)[path]))
    shared = found.model.layers[1].mlp.shared
    assert shared.down.scheme.name == scheme


def test_experts_that_cannot_be_quantised_are_named():
    with pytest.raises(models.CheckpointError, match="mixture of experts, for which awq"):
        choose_settings(models.config_from_dict(QWEN2_MOE), "awq", None, True)
    with pytest.raises(models.CheckpointError, match="all experts of a layer in one tensor"):
        choose_settings(models.config_from_dict(GPT_OSS), "fp8")
