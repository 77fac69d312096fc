"""Gated delta nets beside attention: fields, the rule, formats, quantising, sharing of heads."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from jax.sharding import AbstractMesh
from plain_checkpoints import PROMPTS, decoded, stored_tensors, write_plain, write_tensors
from quantised_files import write_quantised
from safetensors.numpy import load_file

from rjax import models
from rjax.models.decoder import Decoder
from rjax.models.layers.gated_delta_net import GatedDeltaNet
from rjax.models.loading.config import unknown_fields
from rjax.models.loading.match import kv_scale_tensors
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.quantising.awq import scale_inputs
from rjax.models.quantising.calibration import Calibration
from rjax.models.quantising.projections import shared_inputs
from rjax.models.schemes import UNQUANTISED
from tests.crossed import crossed
from tests.kernels.gated_delta_steps import convolution, recurrence

QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 512,
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
QWEN3_NEXT = (
    QWEN3_5
    | EXPERTS
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"}
    | {"mlp_only_layers": [0]}
)
QWEN3_5_MOE = (
    QWEN3_5
    | EXPERTS
    | {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
)
PUBLISHED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
NEXT_80B = PUBLISHED | {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "intermediate_size": 5120,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MOE_35B = PUBLISHED | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "attn_output_gate": True,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "vocab_size": 248320,
}


def load(folder, **options):
    return models.load_model(folder, **{"dtype": "float32", "progress": False} | options)


def linears(model):
    found = nnx.iter_modules(model)
    return {path: linear for path, linear in found if isinstance(linear, models.Linear)}


@pytest.mark.parametrize("values", [NEXT_80B, MOE_35B], ids=["80b", "35b"])
def test_published_configs(values):
    config = models.config_from_dict(values)
    assert unknown_fields(values) == []
    assert config.linear.layers == ((True,) * 3 + (False,)) * (config.num_layers // 4)
    assert config.rope == models.config_from_dict(NEXT_80B).rope
    assert (config.rope.kind, config.rope.theta, config.rope.rotary_dim) == ("default", 1e7, 64)
    assert all(config.experts.layers) and config.experts.router.renormalise
    one_period = dataclasses.replace(
        models.config_from_dict(values | {"num_hidden_layers": 4, "layer_types": None})
    )
    layers = Decoder(one_period, jnp.bfloat16).layers
    linear, attention = layers[0].attention, layers[3].attention
    assert linear.qkvz.output_shape == (16, 6, 128)  # a query, a key, two values, two gates
    assert linear.ba.output_shape == (16, 2, 2) and linear.output.input_shape == (16, 256)
    assert attention.qkv.output_shape == (2, 18, 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "value_heads is 5 and linear_num_key_heads 2; the first"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; .* from 2"),
        ({"layer_types": ["linear_attention"] * 3}, "all 3 layers are linear_attention; at least"),
        ({"layer_types": None}, "all 3 layers are linear_attention"),  # every fourth is not
        ({"layer_types": ["full_attention"] * 2}, "2 entries of the kinds full_attention; exp"),
        ({"layer_types": ["full_attention"] * 2 + ["conv"]}, "3 entries of the kinds conv, full"),
        ({"attn_output_gate": False}, "attn_output_gate is False; it must be true"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be silu or swish"),
    ],
)
def test_what_is_refused(changes, message):
    for values in (QWEN3_5, QWEN3_NEXT, QWEN3_5_MOE):
        with pytest.raises(models.CheckpointError, match=message):
            models.config_from_dict(values | changes)


def test_a_model_without_linear_layers_has_no_sizes_of_them():
    config = models.config_from_dict(QWEN3_5 | {"layer_types": ["full_attention"] * 3})
    assert config.linear is None and config.output_gate
    assert not config.is_linear(0) and "R" not in config.axis_sizes
    assert models.config_from_dict(QWEN3_5).is_linear(2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
def test_plain_operations_are_the_recurrence(tokens):
    K, G, H, Y, X = 2, 3, 6, 4, 4
    draw = np.random.default_rng(tokens)
    mixed = draw.normal(size=(tokens, K, 2 * H + G * Y))
    weight = draw.normal(size=(K, X, 2 * H + G * Y))
    decay = -draw.uniform(0.001, 1.5, (tokens, K, G))
    beta = draw.uniform(0, 1, (tokens, K, G))
    q, k, v = np.split(convolution(mixed, weight), [H, 2 * H], -1)
    q, k = (x / np.sqrt(np.square(x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    expected, _ = recurrence(q, k, v.reshape(tokens, K, G, Y), decay, beta)
    arrays = [jnp.asarray(x, jnp.float32) for x in (mixed, weight, decay, beta)]
    operations = models.DenseAttention()

    def run(mixed, weight, decay, beta):
        return operations.gated_delta(0, mixed, weight, decay, beta, H)

    found = jax.jit(run)(*arrays)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    twice = [jnp.stack([x, x]) for x in (arrays[0], arrays[2], arrays[3])]
    mapped = jax.vmap(lambda m, d, b: run(m, arrays[1], d, b))(*twice)
    np.testing.assert_allclose(mapped[1], expected, rtol=1e-4, atol=2e-5)


def test_operations_without_states_say_so():
    class Without(models.HeadsOperations):
        def attend(self, *_):
            raise AssertionError

    rows = jnp.zeros((1, 1, 1))
    with pytest.raises(NotImplementedError, match="Without has no states of linear attention"):
        Without().gated_delta(0, jnp.zeros((1, 1, 3)), jnp.zeros((1, 4, 3)), rows, rows, 1)


def test_norms_of_values_have_no_offset():
    config = dataclasses.replace(models.config_from_dict(QWEN3_5), num_layers=1)
    layer = models.DecoderLayer(config, 0, jnp.bfloat16)
    assert layer.attention.norm.weight.get_value().dtype == jnp.bfloat16
    assert layer.attention_norm.weight.get_value().dtype == jnp.float32
    assert layer.attention.decay_rate.get_value().dtype == jnp.float32


@pytest.mark.thorough
def test_tensors_that_predict_further_tokens_are_not_loaded(tmp_path):
    folder = write_plain(tmp_path / "plain", QWEN3_NEXT)
    tensors = load_file(folder / "model.safetensors")
    further = tensors | {"mtp.fc.weight": np.zeros((64, 128), np.float32)}
    more = write_tensors(tmp_path / "more", QWEN3_NEXT, further)
    one, other = (logits_of(load(each).model, PROMPTS[1]) for each in (folder, more))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(models.CheckpointError, match="which Qwen3NextForCausalLM does not use"):
        load(write_tensors(tmp_path / "odd", QWEN3_NEXT, tensors | {"mpt": np.zeros(1)}))
    settings = choose_settings(models.config_from_folder(more), "int8")
    quantise_checkpoint(more, tmp_path / "out", settings, progress=False)
    assert not any(name.startswith("mtp.") for name in stored_tensors(tmp_path / "out"))


def test_scales_of_kv_are_those_of_the_layers_that_have_some():
    config = dataclasses.replace(models.config_from_dict(QWEN3_5), kv_scales=True)
    assert set(kv_scale_tensors(config)) == {
        "layers.1.attention.k_scale",
        "layers.1.attention.v_scale",
    }


def of_kind(model, part):
    return {path: each for path, each in linears(model).items() if path[-1] == part}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "values"),
    crossed(
        ["awq", "deepseek-fp8", "w4a16-asym", "fp8-static", "gptq-v2-8bit", "w8a8"],
        [QWEN3_5, QWEN3_NEXT],
        3,
    ),
)
def test_weights_are_those_that_the_file_means(tmp_path, values, name):
    """The gates' projections too, which the file stores in few bits."""
    values = values | {"linear_num_value_heads": 8}  # as many as awq packs in a word
    quantised, plain = write_quantised(tmp_path, values, name)
    found, expected = (load(folder).model for folder in (quantised, plain))
    ours, theirs = linears(found), linears(expected)
    assert ours.keys() == theirs.keys() and len(of_kind(found, "ba")) == 2
    for path, linear in ours.items():
        assert (linear.scheme == UNQUANTISED) == (path[-1] == "ba")
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), theirs[path].weight_matrix(jnp.float32), str(path)
        )
    for path, leaf in nnx.to_flat_state(nnx.state(expected)):
        if path[-1] in ("conv", "decay_rate", "decay_bias"):
            same = dict(nnx.to_flat_state(nnx.state(found)))[path]
            np.testing.assert_array_equal(same[...], leaf[...])
    widened = load(quantised, dequantize=True).model
    for path, linear in linears(widened).items():
        assert linear.scheme == UNQUANTISED
        np.testing.assert_array_equal(linear.weight[...], theirs[path].weight[...], str(path))


def test_modules_that_the_file_ignores(tmp_path):
    """As published: the gates' projections stay in floats."""
    quantised, plain = write_quantised(tmp_path, QWEN3_5, "deepseek-fp8")
    kept = [f"model.layers.{i}.linear_attn.in_proj_{x}" for i in (0, 2) for x in "ab"]
    stored, floats = stored_tensors(quantised), stored_tensors(plain)
    tensors = {name: v for name, v in stored.items() if not name.startswith(tuple(kept))}
    values = json.loads((quantised / "config.json").read_text())
    values["quantization_config"]["modules_to_not_convert"] = [*kept, "lm_head"]
    tensors |= {f"{module}.weight": floats[f"{module}.weight"] for module in kept}
    found = load(write_tensors(tmp_path / "mixed", values, tensors)).model
    assert found.config.dequantised == ()
    for path, linear in linears(load(plain).model).items():
        same = linears(found)[path]
        assert (same.scheme == UNQUANTISED) == (path[-1] == "ba")
        np.testing.assert_array_equal(
            same.weight_matrix(jnp.float32), linear.weight_matrix(jnp.float32), str(path)
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("values", [QWEN3_5, QWEN3_5_MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_quantised_on_load(tmp_path, values, name):
    folder = write_plain(tmp_path / "plain", values)
    found, plain = (load(folder, quantization=q).model for q in (name, None))
    for path, linear in linears(found).items():
        assert linear.scheme.name == ("unquantised" if path[-1] == "ba" else name), path
        wanted = np.asarray(linears(plain)[path].weight_matrix(jnp.float32))
        error = np.abs(np.asarray(linear.weight_matrix(jnp.float32)) - wanted)
        assert (error.max() > 0) == (path[-1] != "ba")
        assert error.max() <= 0.1 * np.abs(wanted).max()
    expected, logits = (logits_of(model, PROMPTS[3]) for model in (plain, found))
    limit = 1.2 if name == "int4" else 0.4  # random weights are far from what 4 bits can hold
    assert 0 < np.linalg.norm(logits - expected) < limit * np.linalg.norm(expected)
    dummy = models.init_model(found.config)
    assert np.isfinite(logits_of(dummy, PROMPTS[3])).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("values", "scheme"),
    [(QWEN3_5, "awq"), (QWEN3_5, "fp8"), (QWEN3_NEXT, "int4"), (QWEN3_5_MOE, "int8")],
)
def test_a_quantised_checkpoint_means_what_the_folder_says(tmp_path, values, scheme):
    folder = write_plain(tmp_path / "plain", values)
    config = models.config_from_dict(values)
    out = tmp_path / "out"
    quantise_checkpoint(
        folder, out, choose_settings(config, scheme), prompts=PROMPTS, progress=False
    )
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    names = ["in_proj_ba"] if values is QWEN3_NEXT else ["in_proj_b", "in_proj_a"]
    kept = {f"model.layers.{i}.linear_attn.{name}" for i in (0, 2) for name in names}
    assert kept == {name for name in ignored if "linear_attn" in name}
    meant = write_tensors(tmp_path / "meant", values, decoded(out))
    found, expected = load(out).model, load(meant).model
    for path, linear in linears(found).items():
        assert (linear.scheme == UNQUANTISED) == (path[-1] == "ba"), path
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32),
            linears(expected)[path].weight_matrix(jnp.float32),
            str(path),
        )


@pytest.mark.thorough
def test_scales_are_searched_on_the_stream_of_the_model(tmp_path):
    """Through layers of both kinds; folded scales keep the function."""
    values = QWEN3_5 | {"num_key_value_heads": 4}  # so that the values can be scaled
    source = write_plain(tmp_path / "source", values)
    config = models.config_from_folder(source)
    tensors = load_file(source / "model.safetensors")
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    calibration = Calibration(config, [PROMPTS[4]], tensors)
    inputs = []
    for layer in range(config.num_layers):
        inputs.append(calibration.advance(layer, tensors))
        groups = shared_inputs(config, layer)
        assert {group.linear for group in groups} == inputs[-1].keys()
        scale_inputs(groups, tensors, dtypes, inputs[-1], choose_settings(config, "awq"))
    assert "attention.qkvz" in inputs[0] and "attention.qkv" in inputs[1]
    assert inputs[0]["attention.output"].magnitudes.shape == (64,)
    model, tokens = load(source).model, jnp.asarray(PROMPTS[4])
    hidden = model(tokens, jnp.arange(len(tokens)), models.DenseAttention())
    ((stream, mask),) = calibration._batches
    np.testing.assert_allclose(model.norm(jnp.asarray(stream[mask])), hidden, rtol=1e-4, atol=1e-4)
    changed = {name for name in tensors if not np.array_equal(tensors[name], before[name])}
    assert {name.split(".")[4] for name in changed} >= {"o_proj", "down_proj"}
    assert not any("linear_attn" in name for name in changed)
    folded = load(write_tensors(tmp_path / "folded", values, tensors)).model
    np.testing.assert_allclose(
        logits_of(folded, PROMPTS[3]), logits_of(model, PROMPTS[3]), rtol=2e-4, atol=2e-4
    )


def test_devices_share_the_key_heads():
    config = models.config_from_dict(QWEN3_5)
    sizes = []
    for devices in (1, 2):
        placed = models.place(config, devices)
        model = Decoder(placed, jnp.float32)
        mesh = AbstractMesh((devices,), ("tensor",))
        sizes.append(models.bytes_of_device(model, mesh))
    net = model.layers[0].attention
    assert isinstance(net, GatedDeltaNet)
    R, D, H, E, B = 2, 64, 24, 32, 2
    shared = 4 * R * (D * (2 * H + 2 * E) + D * 2 * B + (2 * H + E) * 4 + 2 * B + E * D)
    attention = 4 * (64 * 16 * (4 * 2 + 2 * 2) + 4 * 16 * 64)
    rest = 4 * (3 * 3 * 64 * 96 + 2 * 40 * 64)
    assert sizes[0] - sizes[1] == (2 * shared + attention + rest) // 2
    one = models.config_from_dict(QWEN3_5 | {"linear_num_key_heads": 1})
    with pytest.raises(ValueError, match="2 devices cannot share 1 key heads of linear attention"):
        models.place(one, 2)
