"""Random config.json files mean to this package what they mean to transformers' config classes."""

import json
import random

import pytest
from random_configs import HYBRIDS, MODEL_TYPES, random_config
from transformers import AutoConfig

from rjax import models

NUM_CONFIGS = 40


def expected_windows(theirs, num_layers):
    """What transformers' model of this type does with its config."""
    if theirs.model_type in ("llama", "opt", *HYBRIDS):
        return (None,) * num_layers
    if theirs.model_type in ("mistral", "phi3"):
        return (theirs.sliding_window,) * num_layers
    windows = {"full_attention": None, "sliding_attention": theirs.sliding_window}
    return tuple(windows[kind] for kind in theirs.layer_types)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_random_configs_mean_the_same(tmp_path, model_type):
    rng = random.Random(model_type)
    for _ in range(NUM_CONFIGS):
        values = random_config(rng, model_type)
        (tmp_path / "config.json").write_text(json.dumps(values))
        theirs = AutoConfig.from_pretrained(tmp_path)
        ours = models.config_from_folder(tmp_path)
        whole = theirs.hidden_size // theirs.num_attention_heads
        heads = theirs.num_attention_heads
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or whole), values
        assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", heads), values
        assert ours.tie_embeddings == theirs.tie_word_embeddings, values
        assert ours.sliding_windows == expected_windows(theirs, theirs.num_hidden_layers), values
        if model_type in HYBRIDS:
            linear = tuple(kind == "linear_attention" for kind in theirs.layer_types)
            assert linear == tuple(map(ours.is_linear, range(ours.num_layers))), values
        if ours.linear is not None:
            sizes = (ours.linear.key_heads, ours.linear.value_heads, ours.linear.taps)
            assert sizes == (
                theirs.linear_num_key_heads,
                theirs.linear_num_value_heads,
                theirs.linear_conv_kernel_dim,
            )
            dims = theirs.linear_key_head_dim, theirs.linear_value_head_dim
            assert (ours.linear.key_dim, ours.linear.value_dim) == dims, values
        if ours.rope is None:
            assert model_type == "opt"
            assert ours.mlp_bias == theirs.enable_bias, values
            continue
        assert ours.norm_eps == theirs.rms_norm_eps, values
        theirs.standardize_rope_params()  # as the functions do that compute the frequencies
        rope = theirs.rope_parameters
        assert (ours.rope.kind, ours.rope.theta) == (rope["rope_type"], rope["rope_theta"]), values
        part = rope.get("partial_rotary_factor", 1.0)
        assert ours.rope.rotary_dim == int(ours.head_dim * part), values
        if ours.rope.kind in ("llama3", "yarn"):
            original = rope["original_max_position_embeddings"]
            assert ours.rope.original_max_position == original, values
        if ours.rope.kind == "yarn":
            assert ours.rope.truncate == bool(rope.get("truncate", True)), values
