"""Rope scaling stretches the context as it does in vLLM, in all the spellings of config.json."""

import dataclasses

import pytest
from field_cases import LAYER_ROPES, LLAMA, of

from rjax import models

LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(declared, scaling, spelling="rope_scaling", **change):
    scaling = {spelling: scaling}
    return models.config_from_dict(LLAMA | {"max_position_embeddings": declared} | scaling | change)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("declared", "kind", "settings", "longest"),
    [
        (256, "yarn", {"factor": 4.0}, 1024),
        (256, "yarn", {"factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        # Qwen's documented edits: Qwen2.5 and Qwen3.
        (32768, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (40960, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        # Files that declare the stretched context, as DeepSeek's and gpt-oss'.
        (163840, "yarn", {"factor": 40, "original_max_position_embeddings": 4096}, 163840),
        (1000, "yarn", {"original_max_position_embeddings": 300}, 1000),
        (1000, "yarn", {"factor": 1000 / 300, "original_max_position_embeddings": 300}, 1000),
        (256, "linear", {"factor": 4}, 1024),
        (256, "linear", {"factor": 2.5}, 640),
        (256, "dynamic", {"factor": 4.0}, 1024),
        (8192, "llama3", {"factor": 8.0, **LLAMA3}, 8192),
        (
            131072,
            "llama3",
            {"factor": 8.0, "original_max_position_embeddings": 8192, **LLAMA3},
            131072,
        ),
        (131072, "longrope", {"original_max_position_embeddings": 4096, **LISTS}, 131072),
        (4096, "longrope", {"factor": 32.0, **LISTS}, 4096),
        (256, "default", {}, 256),
    ],
)
def test_longest_sequence(spelling, type_, declared, kind, settings, longest):
    config = read(declared, {type_: kind, **settings}, spelling)
    assert config.longest_sequence == longest
    # The angles of dynamic depend on the chosen length; without one they are those as trained.
    assert config.default_length == (declared if kind == "dynamic" else longest)
    assert config.for_length(100).default_length == (
        100 if kind in ("dynamic", "longrope") else longest
    )


@pytest.mark.parametrize("outer", [128, 256])
def test_an_outer_original_context_comes_first(outer):
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read(256, scaling, original_max_position_embeddings=outer)
    assert config.longest_sequence == 4 * outer


def test_ropes_of_types_of_layers():
    # Gemma 3 declares the context that its layers with full attention are stretched to.
    gemma = of("Gemma3", rope_parameters=LAYER_ROPES, num_hidden_layers=6)
    assert models.config_from_dict(gemma).longest_sequence == 8192
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
    olmo = of("Olmo3", rope_scaling=yarn, num_hidden_layers=4)
    assert models.config_from_dict(olmo).longest_sequence == 16384


def test_learned_positions_are_not_stretched():
    config = models.config_from_dict(LLAMA)
    assert dataclasses.replace(config, rope=None).longest_sequence == 8192


def test_a_window_must_hold_the_stretched_context():
    linear = {"type": "linear", "factor": 4.0}
    assert read(256, linear, sliding_window=1024).sliding_windows == (None,) * 3
    with pytest.raises(
        models.CheckpointError, match="sliding_window is 256; it must be null or at"
    ):
        read(256, linear, sliding_window=256)


def test_a_context_of_more_tokens_than_there_are_positions():
    with pytest.raises(
        models.CheckpointError, match=r"stretches the context to .* at most 2147483647"
    ):
        read(8192, {"type": "linear", "factor": 1e12})
