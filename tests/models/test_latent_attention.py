"""Multi-head latent attention: expanded beside absorbed, heads, fields of config.json, formats."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from plain_checkpoints import decoded, write_plain, write_tensors
from safetensors.numpy import load_file

from rjax import models
from rjax.batch.page_groups import one_group
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models.quantising import choose_settings, quantise_checkpoint
from rjax.models.rope import halves_of_pairs
from rjax.pallas_kernels.pending import UnmergedAttention
from rjax.pallas_kernels.rope_and_cache.base import rotate
from rjax.worker.pages.pools import page_bytes

GOLDENS = Path(__file__).parent.parent / "golden" / "experts"
V2, V3 = "deepseek_v2_j8_k3_groups", "deepseek_v3_j8_k3_groups"
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "max_position_embeddings": 64,
    "dtype": "float32",
}


def load(name):
    return models.load_model(GOLDENS / "models" / name, dtype="float32", progress=False)


def _latent(**changes):
    return lambda config: dataclasses.replace(
        config, latent=dataclasses.replace(config.latent, **changes)
    )


def _scale(config):
    scales = dataclasses.replace(config.scales, attention=config.latent.qk_dim**-0.5)
    return dataclasses.replace(config, scales=scales)


def _rope(**changes):
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, **changes)
    )


def _router(**changes):
    def change(config):
        router = dataclasses.replace(config.experts.router, **changes)
        return dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, router=router)
        )

    return change


@pytest.mark.sample(1, 3)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (V2, _latent(norm_eps=1e-2)),
        (V2, _scale),
        (V2, _rope(interleaved=False)),
        (V2, _rope(attention_factor=1.0)),
        (V2, _router(group_best=2)),
        (V2, _router(num_groups=1)),
        (V2, _router(renormalise=True)),
        (V3, _scale),
        (V3, _router(top_groups=1)),
        (V3, _router(group_best=1)),
        ("deepseek_v3_j6_k2_one_group", _rope(interleaved=True)),
        ("deepseek_v3_j6_k2_one_group", _router(renormalise=True)),
    ],
)
def test_goldens_would_show_a_lost_option(name, change):
    loaded = load(name)
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    graph, _ = nnx.split(models.Decoder(change(loaded.config), jnp.float32))
    model = nnx.merge(graph, nnx.state(loaded.model))
    found = logits_of(model, expected["tokens"], expected["positions"])
    difference = np.linalg.norm(found - expected["logits"])
    assert difference > 0.003 * np.linalg.norm(expected["logits"])


def layer_input(config, T=19):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(T, config.hidden_size)), jnp.float32)
    return x, models.rotary_tables(config.rope, 7 * jnp.arange(T))


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("name", [V2, "deepseek_v2_j5_k2_lite_fused", V3])
def test_the_absorbed_form_gives_the_same(name):
    """Attention over the latents: one key and value for all heads, as the paper computes it."""
    loaded = load(name)
    config, latent = loaded.config, loaded.config.latent
    attention = loaded.model.layers[1].attention
    x, rotary = layer_input(config)
    expanded = attention(models.Residual(x), None, rotary, models.DenseAttention()).update

    def product(linear, h):
        found = jnp.tensordot(h, linear.weight_matrix(jnp.float32), 1)
        return found if linear.bias is None else found + linear.bias[...]

    queries = x if attention.q_a is None else attention.q_norm(product(attention.q_a, x))
    q = product(attention.q, queries)
    q_nope, q_rope = jnp.split(q, [latent.nope_dim], -1)
    c, k_rope = jnp.split(product(attention.kv_a, x), [latent.kv_rank], -1)
    c = attention.kv_norm(c)
    if config.rope.interleaved:
        q_rope, k_rope = (halves_of_pairs(one, latent.rope_dim) for one in (q_rope, k_rope))
    q_rope = rotate(q_rope, rotary.cos, rotary.sin)
    k_rope = rotate(k_rope[:, None], rotary.cos, rotary.sin)[:, 0]
    up = attention.kv_b.weight_matrix(jnp.float32)  # [Z, N, E]
    absorbed = jnp.einsum("TNE,ZNE->TNZ", q_nope, up[:, :, : latent.nope_dim])
    scores = jnp.einsum("TNZ,SZ->NTS", absorbed, c) + jnp.einsum("TNR,SR->NTS", q_rope, k_rope)
    scores = jnp.where(jnp.tri(len(x), dtype=bool), scores * config.scales.attention, -jnp.inf)
    mixed = jnp.einsum("NTS,SZ->TNZ", jax.nn.softmax(scores), c)
    values = jnp.einsum("TNZ,ZNO->TNO", mixed, up[:, :, latent.nope_dim :])
    wanted = product(attention.output, values.reshape(len(x), -1))
    np.testing.assert_allclose(expanded, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [V2, "deepseek_v2_j5_k2_lite_fused", "glm4_moe_lite_j7_k3"])
def test_heads_are_padded_to_one_size(name):
    loaded = load(name)
    config, latent = loaded.config, loaded.config.latent
    seen = []

    class Looking(models.DenseAttention):
        def attend(self, layer, q, k, v, *rest):
            seen.append((q, k, v))
            return super().attend(layer, q, k, v, *rest)

    x, rotary = layer_input(config)
    loaded.model.layers[0].attention(models.Residual(x), None, rotary, Looking())
    [(q, k, v)] = seen
    H = config.head_dim
    assert max(latent.qk_dim, latent.value_dim) == H and config.num_kv_heads == config.num_heads
    assert q.shape == k.shape == v.shape == (19, config.num_heads, H)
    for heads, size in ((q, latent.qk_dim), (k, latent.qk_dim), (v, latent.value_dim)):
        assert not np.asarray(heads[:, :, size:]).any()
        assert np.abs(np.asarray(heads[:, :, :size])).min(axis=(0, 1)).all()
    # All heads share the rotated dims of their keys, which come first.
    assert rotary.cos.shape[-1] * 2 == latent.rope_dim
    np.testing.assert_array_equal(k[:, :1, : latent.rope_dim], k[:, 1:2, : latent.rope_dim])
    assert np.abs(np.asarray(k[:, 0] - k[:, 1])[:, latent.rope_dim : latent.qk_dim]).max() > 0.1


def test_results_that_are_not_merged_lose_their_padding():
    draw = np.random.default_rng(1)
    out, partial = (jnp.asarray(draw.normal(size=(n, 2, 12)), jnp.float32) for n in (3, 5))
    unmerged = UnmergedAttention(out, partial, jnp.zeros((5, 2)), jnp.arange(4))
    found = unmerged.first_dims(8)
    assert found.shape == (3, 2, 8)
    np.testing.assert_array_equal(found.partial_out, partial[:, :, :8])
    np.testing.assert_array_equal(found.out, out[:, :, :8])


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 0.1147213867929261),  # DeepSeek-V2-Lite
        (
            {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1, "mscale_all_dim": 1}},
            0.13523,
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1}}, 192**-0.5),
        ({"rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 1}}, 192**-0.5),
        ({"rope_scaling": None}, 192**-0.5),
    ],
)
def test_yarn_scales_the_scores(changes, scale):
    config = models.config_from_dict(SHAPES["deepseek-v2-lite"] | changes)
    assert config.scales.attention == pytest.approx(scale, rel=1e-4)


def test_the_published_config_of_deepseek_v3():
    fields = SHAPES["deepseek-v2-lite"] | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 3,
        "topk_group": 4,
        "topk_method": "noaux_tc",
    }
    config = models.config_from_dict(fields)
    assert config.experts.layers == (False, False, False, True)
    model = models.Decoder(config, jnp.bfloat16)
    attention = model.layers[0].attention
    # Scales of 128 x 128: blocks that heads of 192 cut in two are stored as halves.
    shapes = [linear.weight_scale.get_value().shape for linear in attention.input_projections]
    assert shapes == [(12, 56), (128, 3, 12), (9, 56), (128, 2, 4)]
    assert attention.output.weight_scale.get_value().shape == (56, 128, 1)
    experts = model.layers[3].mlp.how
    assert (experts.num_groups, experts.top_groups, experts.group_best) == (8, 4, 2)


def test_no_rank_and_a_missing_one():
    without = {name: value for name, value in DEEPSEEK.items() if name != "q_lora_rank"}
    assert models.config_from_dict(without).latent.q_rank == 1536
    assert models.config_from_dict(without | {"q_lora_rank": None}).latent.q_rank is None


@pytest.mark.parametrize(("shapes", "kib"), [("deepseek-v2-lite", 324), ("glm-4.7-flash", 940)])
def test_bytes_of_a_token(shapes, kib):
    """Those of the table in docs/models.md."""
    config = models.config_from_dict(SHAPES[shapes])
    groups = one_group(config.num_layers)
    assert page_bytes(config, groups, 64, jnp.dtype(jnp.bfloat16)) == 64 * kib * 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2; it must be num_attention_heads"),
        ({"head_dim": 48}, "head_dim is 48; it must be qk_rope_head_dim"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 3"),  # of a group of 2
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"qk_rope_head_dim": 5}, "rotates 5 dims"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; it must be sigmoid"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(models.CheckpointError, match=message):
        models.config_from_dict(DEEPSEEK | changes)


def test_kinds_of_layers_that_do_not_fit():
    glm = DEEPSEEK | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite"}
    for kinds in (["dense"], ["dense", "moe"]):
        with pytest.raises(models.CheckpointError, match="2 times dense or sparse"):
            models.config_from_dict(glm | {"mlp_layer_types": kinds})
    values = glm | {"mlp_layer_types": ["sparse", "dense"], "first_k_dense_replace": 3}
    assert models.config_from_dict(values).experts.layers == (True, False)


def test_scales_of_the_latent_are_refused():
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "kv_cache_scheme": kv | {"symmetric": True},
    }
    with pytest.raises(models.CheckpointError, match="remove kv_cache_scheme"):
        models.config_from_dict(DEEPSEEK | {"quantization_config": quantization})
    quantization["kv_cache_scheme"] = None
    assert models.config_from_dict(DEEPSEEK | {"quantization_config": quantization}).schemes


def linears(model):
    found = nnx.iter_modules(model)
    return {path: linear for path, linear in found if isinstance(linear, models.Linear)}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_quantised_checkpoint_means_what_the_folder_says(tmp_path, scheme):
    folder = write_plain(tmp_path / "plain", DEEPSEEK)
    settings = choose_settings(models.config_from_dict(DEEPSEEK), scheme)
    quantise_checkpoint(folder, tmp_path / "out", settings, progress=False)
    meant = write_tensors(tmp_path / "meant", DEEPSEEK, decoded(tmp_path / "out"))
    found, expected = (
        linears(models.load_model(one, dtype="float32", progress=False).model)
        for one in (tmp_path / "out", meant)
    )
    assert sum(path[-2] == "attention" for path in found) == 2 * 5
    for path, linear in found.items():
        assert linear.scheme.name == scheme
        np.testing.assert_array_equal(
            linear.weight_matrix(jnp.float32), expected[path].weight_matrix(jnp.float32), str(path)
        )


def test_scales_for_latents_cannot_be_searched():
    dense = DEEPSEEK | {"first_k_dense_replace": 2}
    with pytest.raises(models.CheckpointError, match="latent attention, for which awq"):
        choose_settings(models.config_from_dict(dense), "awq")
