"""Quantised checkpoints of Gemma 4 as tools publish them: the weights that the file means."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gemma4_configs import LARGE, MIXTURE, SMALL, TEXTS, text_of, whole_of
from plain_checkpoints import decoded, stored_tensors, write_plain, write_tensors
from quantised_files import FORMATS, write_quantised
from test_gated_delta_net import MOE_35B
from test_quantised_loading import linears, load

from rjax import models
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.schemes import UNQUANTISED

LANGUAGE = "model.language_model."
TOWERS = ("model.vision_tower.layers.0.q_proj.linear", "model.embed_vision.embedding_projection")
EXPRESSIONS = ["re:.*embed.*", "re:.*router", "re:.*vision_tower.*", "re:.*norm.*", "lm_head"]


def rewrite(folder, added, removed=()):
    """Add tensors to a folder in place, and remove those with these words in their names."""
    tensors = stored_tensors(folder)
    tensors = {n: v for n, v in tensors.items() if not any(word in n for word in removed)}
    values = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    write_tensors(folder, values, tensors | added)


def with_rules(folder, **rules):
    """Change fields of the quantization_config."""
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= rules
    (folder / "config.json").write_text(json.dumps(values))


def check_equal(quantised, plain, **options):
    """The model of a quantised folder, whose weights are those of the plain one."""
    found, expected = load(quantised, **options).model, load(plain).model
    theirs = linears(expected)
    assert linears(found).keys() == theirs.keys()
    for path, linear in linears(found).items():
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), theirs[path].weight_matrix(jnp.float32), str(path)
        )
    of_linears = {(*path, leaf) for path in theirs for leaf in ("weight", "weight_scale")}
    others = dict(nnx.to_flat_state(nnx.state(found)))
    for path, leaf in nnx.to_flat_state(nnx.state(expected)):
        if path not in of_linears:
            np.testing.assert_array_equal(others[path][...], leaf[...], str(path))
    return found


def kept_modules(config):
    """The modules that llm-compressor's recipes for Gemma 4 leave in floats, by name."""
    layers = range(config.num_layers)
    routers = [f"{LANGUAGE}layers.{i}.router.proj" for i in layers if config.experts is not None]
    return ["lm_head", *TOWERS, *routers]


@pytest.mark.sample(4)
@pytest.mark.parametrize("rules", ["names", "expressions"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", ["fp8-dynamic", "fp8-block", "w4a16", "w4a16-asym", "w8a8"])
def test_compressed_tensors(tmp_path, form, text, rules):
    """As llm-compressor writes it, the experts each in tensors of its own: `oneshot` names every
    module that it left out, `model_free_ptq` has the expressions of its recipe."""
    folders = write_quantised(tmp_path, whole_of(TEXTS[text]), form)
    for folder in folders:
        rewrite(folder, {f"{tower}.weight": np.ones(2) for tower in TOWERS})
    config = models.config_from_folder(folders[1])
    kept = kept_modules(config) if rules == "names" else EXPRESSIONS
    if text == "small":  # which write_quantised leaves in floats
        kept = [*kept, f"{LANGUAGE}per_layer_model_projection"]
    with_rules(folders[0], ignore=kept)
    found = check_equal(*folders)
    for path, linear in linears(found).items():
        assert (linear.scheme == UNQUANTISED) == ("per_layer" in path), path
    check_equal(*folders, dequantize=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", ["gptq", "gptq-v2-8bit", "awq", "deepseek-fp8", "fp8-static"])
def test_formats_that_name_few_exceptions(tmp_path, form, text):
    """GPTQModel and AutoAWQ quantise what is in the layers, and do not name the rest."""
    folders = write_quantised(tmp_path, text_of(TEXTS[text]), form)
    found = check_equal(*folders)
    assert found.layers[0].attention.qkv.scheme != UNQUANTISED
    if text == "small":
        assert found.config.dequantised  # the projections of per-layer inputs in the layers
        assert "per_layer.projection" not in dict(found.config.dequantised)


def test_the_unified_model(tmp_path):
    values = whole_of({**LARGE, "num_kv_shared_layers": 0}, "Gemma4Unified")
    folders = write_quantised(tmp_path, values, "fp8-dynamic")
    with_rules(folders[0], ignore=["lm_head", "re:.*embed_vision.*", "re:.*vision_embedder.*"])
    found = check_equal(*folders)
    assert all(linear.scheme != UNQUANTISED for linear in linears(found).values())


@pytest.mark.parametrize("form", ["fp8-dynamic", "w4a16"])
def test_a_quantised_projection_of_per_layer_inputs(tmp_path, form):
    """With targets "Linear" alone, tools quantise the one outside of the layers too."""
    folders = write_quantised(tmp_path, whole_of(SMALL), form)
    module, (_, encode) = f"{LANGUAGE}per_layer_model_projection", FORMATS[form]
    stored, weight = encode(module, (4 * 32, 128), np.random.default_rng(3))
    rewrite(folders[1], {f"{module}.weight": weight})
    rewrite(folders[0], stored, [module])
    found = check_equal(*folders)
    assert "per_layer.projection" in dict(found.config.dequantised)


@pytest.mark.parametrize("form", ["fp8-dynamic", "deepseek-fp8", "w4a16"])
def test_quantised_routers_are_dequantised(tmp_path, form):
    """A recipe that does not leave them out quantises them, as linear modules."""
    folders = write_quantised(tmp_path, text_of(MIXTURE), form)
    modules, (_, encode) = [f"model.layers.{i}.router.proj" for i in range(4)], FORMATS[form]
    draw = np.random.default_rng(3)
    for module in modules:
        stored, weight = encode(module, (8, 128), draw)
        rewrite(folders[1], {f"{module}.weight": weight})
        rewrite(folders[0], stored, [module])
    found = check_equal(*folders)
    assert found.layers[0].mlp.router[...].dtype == jnp.float32


def fuse_experts(folders, config, form):
    """Replace the experts of each layer by one tensor, quantised in a form and as floats."""
    experts, draw = config.experts, np.random.default_rng(7)
    shapes = {
        "gate_up_proj": (2 * experts.width, config.hidden_size),
        "down_proj": (config.hidden_size, experts.width),
    }
    names = (name for name in stored_tensors(folders[1]) if ".experts.0.gate_proj" in name)
    blocks = {name.rpartition(".0.gate_proj")[0] for name in names}
    new = ({}, {})
    for block in sorted(blocks):
        for name, shape in shapes.items():
            made = [FORMATS[form][1]("e", shape, draw) for _ in range(experts.num_experts)]
            stored = {key: np.stack([own[key] for own, _ in made]) for key in made[0][0]}
            new[1][f"{block}.{name}"] = np.stack([weight for _, weight in made])
            for key, value in stored.items():
                of_scale = key.removeprefix("e.weight").removeprefix("e.")
                if of_scale == "activation_scale":
                    new[0][f"{block}.{name}_{of_scale}"] = value.reshape(-1)
                    continue
                scalar = value.ndim == 2
                new[0][f"{block}.{name}{of_scale}"] = value[..., None] if scalar else value
    for folder, tensors in zip(folders, new, strict=True):
        rewrite(folder, tensors, [f".experts.{i}." for i in range(experts.num_experts)])


QWEN_MIXTURE = {
    **MOE_35B,
    "vocab_size": 40,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


@pytest.mark.parametrize("family", ["gemma", "qwen"])
@pytest.mark.parametrize("form", ["deepseek-fp8", "fp8-of-transformers"])
def test_experts_in_one_tensor_in_fp8(tmp_path, form, family):
    """As `save_pretrained` writes a model that transformers quantised: blocks of 128 outputs begin
    in the gates and end in the other half."""
    values = text_of(MIXTURE) if family == "gemma" else QWEN_MIXTURE
    values = values | {"moe_intermediate_size": 192}
    folders = write_quantised(tmp_path, values, form)
    fuse_experts(folders, models.config_from_folder(folders[1]), form)
    found = check_equal(*folders)
    for layer in found.layers:
        assert layer.mlp.up.scheme.values == layer.mlp.down.scheme.values == "fp8"
    check_equal(*folders, dequantize=True)


def test_gates_with_a_scale_of_their_own(tmp_path):
    """Experts whose gates and other half had a scale each before they were joined."""
    folders = write_quantised(tmp_path, text_of(MIXTURE), "fp8-of-transformers")
    fuse_experts(folders, models.config_from_folder(folders[1]), "fp8-of-transformers")
    ends = "gate_up_proj", "gate_up_proj_scale_inv"

    stored, plain = map(stored_tensors, folders)
    scales = {name: value for name, value in stored.items() if name.endswith(ends[1])}
    joined = {n: np.concatenate([value, 3 * value], 1) for n, value in scales.items()}
    weights = {name: value for name, value in plain.items() if name.endswith(ends[0])}
    for value in weights.values():
        value[:, 64:] *= 3
    rewrite(folders[0], joined)
    rewrite(folders[1], weights)
    quantised, plain = (linears(load(folder).model) for folder in folders)
    for path, linear in quantised.items():
        weights = (each.weight_matrix(jnp.float32) for each in (linear, plain[path]))
        np.testing.assert_allclose(*weights, rtol=1e-6)


@pytest.mark.parametrize("form", ["gptq", "w4a16", "fp8-dynamic", "deepseek-fp8"])
def test_experts_in_one_tensor_of_floats(tmp_path, form):
    """A tool that quantises linear modules alone leaves them, and config.json does not say so."""
    folders = write_quantised(tmp_path, text_of(MIXTURE), form)
    fuse_experts(folders, models.config_from_folder(folders[1]), "fp8-dynamic")
    fused = {n: v for n, v in stored_tensors(folders[1]).items() if ".experts." in n}

    rewrite(folders[0], fused, [".experts."])
    found = check_equal(*folders)
    assert found.layers[0].mlp.up.scheme == UNQUANTISED
    assert found.layers[0].mlp.shared.up.scheme != UNQUANTISED


def test_experts_in_one_tensor_that_no_format_stores(tmp_path):
    folders = write_quantised(tmp_path, text_of(MIXTURE), "w8a8")
    fuse_experts(folders, models.config_from_folder(folders[1]), "w8a8")
    with pytest.raises(models.CheckpointError, match="'compressed-tensors' cannot store in one"):
        load(folders[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_quantised_checkpoint_means_what_the_folder_says(tmp_path, text, scheme):
    values = whole_of(TEXTS[text])
    folder = write_plain(tmp_path / "plain", values)
    rewrite(folder, {f"{tower}.weight": np.ones(2) for tower in TOWERS})
    config, out = models.config_from_folder(folder), tmp_path / "out"
    quantise_checkpoint(folder, out, choose_settings(config, scheme), progress=False)
    meant = write_tensors(tmp_path / "meant", values, decoded(out))
    found = check_equal(out, meant)
    for path, linear in linears(found).items():
        assert (linear.scheme == UNQUANTISED) == ("per_layer" in path), path
