"""Logits and greedy tokens equal transformers': from stored goldens, and live where torch is."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from forward import logits_of
from golden import compare
from safetensors.numpy import load_file

from rjax import models

GOLDENS = Path(__file__).parent.parent / "golden"
CASES = sorted(json.loads((GOLDENS / "cases.json").read_text()))


@pytest.mark.parametrize("name", CASES)
def test_equals_goldens(name):
    compare(GOLDENS, name)


def test_goldens_are_small_and_say_who_made_them():
    sizes = {path: path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()}

    def size_of(folder):
        return sum(size for path, size in sizes.items() if GOLDENS / folder in path.parents)

    assert size_of("quantised") <= 3_000_000
    assert size_of("experts") <= 3_000_000
    assert size_of("multimodal") <= 4_000_000
    others = sum(map(size_of, ("quantised", "experts", "families", "multimodal")))
    assert sum(sizes.values()) - others <= 5_000_000
    assert {"torch", "transformers"} <= json.loads((GOLDENS / "versions.json").read_text()).keys()


@pytest.fixture(scope="module")
def live_goldens(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("live")
    subprocess.run([sys.executable, GOLDENS / "make_goldens.py", GOLDENS, folder], check=True)
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_live(live_goldens, name):
    compare(live_goldens, name)


def _no_window(config):
    return dataclasses.replace(config, sliding_windows=(None,) * config.num_layers)


def _windows_everywhere(config):
    window = max(filter(None, config.sliding_windows))
    return dataclasses.replace(config, sliding_windows=(window,) * config.num_layers)


def _rope(**changes):
    return lambda config: dataclasses.replace(
        config, rope=dataclasses.replace(config.rope, **changes)
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral_g8_h64_window", _no_window),
        ("qwen2_g2_h32_windows_tied", _no_window),
        ("phi3_g7_h80_partial_window", _no_window),
        ("llama_g8_h128_rope_llama3", _rope(kind="default")),
        ("llama_g2_h64_rope_linear", _rope(kind="default")),
        ("llama_g1_h96_rope_yarn", _rope(kind="default")),
        ("qwen3_g1_h96_rope_yarn", _rope(kind="default")),
        ("llama_g1_h96_rope_yarn", _rope(attention_factor=1.0)),
        ("ministral_g2_h32_layer_types", _windows_everywhere),
        ("mistral_g2_h32_layer_types", _windows_everywhere),
        ("llama_g2_h32_rope_fields_twice", _rope(original_max_position=2048)),
    ],
)
def test_goldens_would_show_a_lost_option(name, change):
    loaded = models.load_model(GOLDENS / "models" / name, dtype="float32", progress=False)
    expected = load_file(GOLDENS / "expected" / f"{name}.safetensors")
    graph, _ = nnx.split(models.Decoder(change(loaded.config), jnp.float32))
    model = nnx.merge(graph, nnx.state(loaded.model))
    found = logits_of(model, expected["tokens"], expected["positions"])
    difference = np.linalg.norm(found - expected["logits"])
    assert difference > 0.01 * np.linalg.norm(expected["logits"])
