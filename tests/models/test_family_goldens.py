"""Every family of ``golden/families``: logits and greedy tokens equal transformers'."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from golden import compare
from safetensors.numpy import load_file

from rjax import models
from rjax.models.families import TEXT_FAMILIES

GOLDENS = Path(__file__).parent.parent / "golden"
CASES = sorted(json.loads((GOLDENS / "families" / "cases.json").read_text()))


@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name):
    compare(GOLDENS / "families", name)


def _scales(**changes):
    return lambda config: dataclasses.replace(
        config, scales=dataclasses.replace(config.scales, **changes)
    )


def _ropes(**changes):
    def change(config):
        ropes = config.layer_ropes or (config.rope,) * config.num_layers
        ropes = (one and dataclasses.replace(one, **changes) for one in ropes)
        return dataclasses.replace(config, layer_ropes=tuple(ropes))

    return change


def _router(**changes):
    def change(config):
        router = dataclasses.replace(config.experts.router, **changes)
        experts = dataclasses.replace(config.experts, router=router)
        return dataclasses.replace(config, experts=experts)

    return change


def _norm_eps(config):
    return dataclasses.replace(config, norm_eps=1e-6)


def _same_rope(config):
    return dataclasses.replace(config, layer_ropes=())


def _router(**changes):
    def change(config):
        router = dataclasses.replace(config.experts.router, **changes)
        return dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, router=router)
        )

    return change


def _before_rope(config):
    norms = dataclasses.replace(config.norms, qk_behind_rope=False)
    return dataclasses.replace(config, norms=norms)


def _plain_values(config):
    norms = dataclasses.replace(config.norms, on_values=False)
    return dataclasses.replace(config, norms=norms)


def _no_window(config):
    return dataclasses.replace(config, sliding_windows=(None,) * config.num_layers)


@pytest.mark.sample(3, 7)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2_g3_h16_caps_windows", _no_window),
        ("gemma2_g3_h16_caps_windows", _scales(attention=None)),
        ("gemma2_g3_h16_caps_windows", _scales(attention_soft_cap=None)),
        ("gemma2_g3_h16_caps_windows", _scales(logit_soft_cap=None)),
        ("gemma2_g3_h16_caps_windows", _scales(embedding=1.0)),
        ("gemma3_g3_h32_layer_types", _same_rope),
        ("gemma3_g1_h24_old_fields", _no_window),
        ("gemma4_g6_h32_keys_are_values", _scales(attention=None)),
        ("gemma4_g6_h32_keys_are_values", _scales(logit_soft_cap=None)),
        ("gemma4_g6_h32_keys_are_values", _ropes(kind="default")),
        ("gemma4_g6_h32_keys_are_values", _plain_values),
        ("gemma4_g2_h16_inputs_shared_kv", _no_window),
        ("gemma4moe_j7_k3_global_heads", _ropes(factor=1.0)),
        ("gemma4moe_j7_k3_global_heads", _router(score="sigmoid")),
        ("gemma4u_g4_h48_full_last", _plain_values),
        ("olmo3_g1_h24_yarn_windows", _same_rope),
        ("olmo3_g1_h24_yarn_windows", _no_window),
        ("smollm3_g3_h16_no_rope", _same_rope),
        ("granite_g3_h16_multipliers", _scales(attention=None)),
        ("granite_g3_h16_multipliers", _scales(residual=1.0)),
        ("granite_g3_h16_multipliers", _scales(logits=1.0)),
        ("glm4_g3_h24_partial", _ropes(interleaved=False)),
        ("ministral3_g3_h24_query_scale", _ropes(query_scale_beta=0.0)),
        ("exaone4_g3_h16_hybrid", _same_rope),
        ("cohere2_g3_h16_parallel", _ropes(interleaved=False)),
        ("phi4_mini_g3_h32_longrope_long", _ropes(max_length=1)),
        ("phi4_mini_g3_h32_longrope_short", _ropes(max_length=256)),
        ("llama_g3_h16_rope_dynamic_beyond", _ropes(max_length=64)),
        ("qwen3_next_r3_g1_dense_layer", _ropes(rotary_dim=16)),
        ("qwen3_next_r3_g1_dense_layer", _router(renormalise=False)),
        ("qwen3_next_r3_g1_dense_layer", _norm_eps),
        ("qwen3_next_r2_g3_tied_fused", _router(renormalise=True)),
        ("qwen3_next_r2_g3_tied_fused", _ropes(theta=10000.0)),
        ("qwen3_5_r3_g2_linear_last", _ropes(rotary_dim=4)),
        ("qwen3_5_r5_g1_tied_yarn", _ropes(kind="default")),
        ("qwen3_5_moe_r3_g1_tied", _router(renormalise=False)),
        ("ernie_g3_h32_biases", _ropes(interleaved=False)),
        ("hunyuan_g3_h32_alpha", _before_rope),
        ("hunyuan_g3_h32_alpha", _ropes(theta=10000.0)),
        ("hunyuanmoe_j7_k3_list", _router(renormalise=False)),
        ("erniemoe_j7_k3_interval", _router(score="sigmoid")),
        ("erniemoe_j7_k3_interval", _router(renormalise=False)),
        ("minimax_j7_k3_partial", _ropes(rotary_dim=24)),
        ("minimax_j7_k3_partial", _router(score="softmax")),
        ("minimax_j7_k3_partial", _router(renormalise=False)),
    ],
)
def test_goldens_would_show_a_lost_option(name, change):
    folder = GOLDENS / "families"
    expected = load_file(folder / "expected" / f"{name}.safetensors")
    loaded = models.load_model(
        folder / "models" / name,
        dtype="float32",
        progress=False,
        max_length=int(expected["positions"][-1]) + 1,
    )
    graph, _ = nnx.split(models.Decoder(change(loaded.config), jnp.float32))
    model = nnx.merge(graph, nnx.state(loaded.model))
    found = logits_of(model, expected["tokens"], expected["positions"])
    difference = np.linalg.norm(found - expected["logits"])
    assert difference > 0.003 * np.linalg.norm(expected["logits"])


def test_goldens_are_small_and_say_who_made_them():
    folder = GOLDENS / "families"
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    assert sum(sizes) <= 10_000_000
    assert {"torch", "transformers"} <= json.loads((folder / "versions.json").read_text()).keys()


def test_every_family_has_goldens():
    places = (GOLDENS, GOLDENS / "families", GOLDENS / "experts")
    folders = [folder for place in places for folder in (place / "models").iterdir()]
    assert {models.config_from_folder(folder).architecture for folder in folders} == set(
        TEXT_FAMILIES
    )
