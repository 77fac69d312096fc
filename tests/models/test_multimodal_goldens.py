"""Text models of architectures with towers: logits and greedy tokens equal transformers'."""

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
from rjax.models.families.multimodal_models import MULTIMODAL
from rjax.models.loading.tensors import read_tensors
from rjax.models.rope import rotary_tables

GOLDENS = Path(__file__).parent.parent / "golden" / "multimodal"
CASES = sorted(json.loads((GOLDENS / "cases.json").read_text()))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name):
    compare(GOLDENS, name)


def test_every_architecture_has_two_goldens():
    found = [
        models.config_from_folder(folder).architecture for folder in (GOLDENS / "models").iterdir()
    ]
    assert sorted(found) == sorted(2 * [family.architecture for family in MULTIMODAL])


def test_goldens_have_towers_and_every_layout():
    found = set()
    for folder in (GOLDENS / "models").iterdir():
        text = models.config_from_folder(folder).text_model
        assert text is not None
        found.add(text.decoder)
        towers = [name for name in read_tensors(folder) if not name.startswith(text.decoder)]
        starts = ("vision_tower.", "visual.", "embed_vision.")
        assert any(start in name for name in towers for start in starts), folder
    assert found == {"model.language_model.", "language_model.model.", "model."}


def _ropes(**changes):
    def change(config):
        ropes = config.layer_ropes or (config.rope,) * config.num_layers
        return dataclasses.replace(
            config, layer_ropes=tuple(dataclasses.replace(one, **changes) for one in ropes)
        )

    return change


def _no_window(config):
    return dataclasses.replace(config, sliding_windows=(None,) * config.num_layers)


def _cap(config):
    return dataclasses.replace(config, scales=dataclasses.replace(config.scales, logit_soft_cap=2))


def _router(**changes):
    def change(config):
        router = dataclasses.replace(config.experts.router, **changes)
        experts = dataclasses.replace(config.experts, router=router)
        return dataclasses.replace(config, experts=experts)

    return change


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma3vl_g3_h32_windows", _no_window),
        ("gemma3vl_g1_h24_untied", _cap),
        ("mistral3_g3_h24_open_tie", _no_window),
        ("mistral3_g3_h24_query_scale", _ropes(query_scale_beta=0.0)),
        ("qwen2vl_g2_h24_sliding", _no_window),
        ("qwen25vl_g3_h16_flat_windows", _no_window),
        ("qwen25vl_g2_h24_yarn", _ropes(kind="default")),
        ("qwen3vl_g3_h32_interleaved", _ropes(theta=5e5)),
        ("qwen3vlmoe_j6_k3_dense_layer", _router(renormalise=False)),
        ("glm4v_g3_h24_partial", _ropes(interleaved=False)),
        ("glm4v_g2_h16_old_fields", _ropes(rotary_dim=16)),
        ("glm4vmoe_j8_k3_groups", _router(num_groups=1, top_groups=1)),
        ("glm4vmoe_j8_k3_groups", _ropes(rotary_dim=16)),
    ],
)
def test_goldens_would_show_a_lost_option(name, change):
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    loaded = models.load_model(GOLDENS / "models" / name, dtype="float32", progress=False)
    graph, _ = nnx.split(models.Decoder(change(loaded.config), jnp.float32))
    model = nnx.merge(graph, nnx.state(loaded.model))
    found = logits_of(model, expected["tokens"], expected["positions"])
    difference = np.linalg.norm(found - expected["logits"])
    assert difference > 0.003 * np.linalg.norm(expected["logits"])


def _in_sections(axes, sections):
    """Qwen2-VL and GLM-4V: neighbouring dims have the angles of one axis."""
    ends = np.cumsum(sections)[:-1]
    parts = [np.split(axis, ends, -1) for axis in axes]
    return np.concatenate([parts[i % 3][i] for i in range(len(sections))], -1)


def _interleaved(axes, sections):
    """Qwen3-VL: every third dim has the angle of the height, or of the width."""
    found = axes[0].copy()
    for axis in (1, 2):
        dims = slice(axis, 3 * sections[axis], 3)
        found[:, dims] = axes[axis][:, dims]
    return found


@pytest.mark.parametrize("recompose", [_in_sections, _interleaved])
@pytest.mark.parametrize("sections", [(6, 5, 5), (2, 7, 7)])
def test_positions_of_three_axes_are_plain_ones_for_text(recompose, sections):
    rope = models.config_from_folder(GOLDENS / "models" / "qwen3vl_g3_h32_interleaved").rope
    assert rope is not None and rope.rotary_dim == 2 * sum(sections)
    positions = np.arange(40, dtype=np.int32) * 29

    def tables(axes):
        rotary = [rotary_tables(rope, jnp.asarray(axis)) for axis in axes]
        return [
            recompose([np.asarray(getattr(one, name)) for one in rotary], sections)
            for name in ("cos", "sin")
        ]

    plain = rotary_tables(rope, jnp.asarray(positions))
    cos, sin = tables([positions] * 3)
    np.testing.assert_array_equal(cos, plain.cos)
    np.testing.assert_array_equal(sin, plain.sin)
    cos, _ = tables([positions, positions // 3, positions // 2])  # as of an image
    assert np.abs(cos - np.asarray(plain.cos)).max() > 0.1
