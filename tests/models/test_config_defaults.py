"""Fields that are missing or null mean what they mean to transformers' config classes."""

import functools
import json

import pytest
from field_cases import ARCHITECTURES, BASES, BESIDE, NOT_OF_A_FAMILY, model_types
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rjax import models
from rjax.models.families import FAMILIES
from rjax.models.families.rope_fields import ROPE_FIELDS

# rjax does not guess the size of a model.
REQUIRED = {
    *("ffn_dim", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_attention_heads", "num_hidden_layers", "vocab_size"),
}
REQUIRED_OF = {
    ("DeepseekV2ForCausalLM", "num_experts_per_tok"),  # transformers' default is None
    ("DeepseekV2ForCausalLM", "n_group"),
    ("DeepseekV2ForCausalLM", "topk_group"),
}
ROPE = {*ROPE_FIELDS, "partial_rotary_factor", "rope_local_base_freq"}
# Older spellings, which a config class takes without declaring them.
SPELLINGS = {
    *("dtype", "num_local_experts", "num_experts", "seq_length", "sliding_window_pattern"),
    *("torch_dtype", "n_embed", "topk_method", "norm_topk_prob", "full_attention_interval"),
    "rotary_dim",
}
# Which transformers turns into settings of single layers.
OF_LAYERS = {"global_head_dim", "num_global_key_value_heads", "per_layer_config"}


def read(values):
    """The config, or None where it is refused."""
    try:
        return models.config_from_dict(values)
    except models.CheckpointError:
        return None


@functools.cache
def _theirs(model_type, text):
    config = CONFIG_MAPPING[model_type].from_dict(json.loads(text))
    config.allow_global_per_layer_attribute_access = True  # layers may differ
    return config


def theirs(architecture, values):
    """transformers' config, or None if its class refuses the values."""
    heads = values.get("num_attention_heads")
    if architecture == "Glm4MoeLiteForCausalLM":  # whose class refuses null
        values = values | {"num_key_value_heads": heads}
    try:
        return _theirs(model_types(architecture)[0], json.dumps(values))
    except Exception:
        return None


def without(architecture, field):
    """A config of the family in which the field matters, without it."""
    values = BASES[architecture] | BESIDE.get((architecture, field), BESIDE.get(field, {}))
    if field == "num_key_value_heads":
        values = values | {"num_attention_heads": 16, "hidden_size": 256}  # any default divides it
    return {name: value for name, value in values.items() if name != field}


def cases(of_rope):
    return [
        (name, field)
        for name in ARCHITECTURES
        for field in sorted(FAMILIES[name].fields.reads - NOT_OF_A_FAMILY)
        if (field in ROPE) == of_rope and field not in OF_LAYERS
    ]


def is_required(architecture, field):
    if architecture == "BloomForCausalLM":  # the others have a second name
        return field == "vocab_size"
    return field in REQUIRED or (architecture, field) in REQUIRED_OF


@pytest.mark.parametrize(("architecture", "field"), cases(of_rope=False))
def test_a_missing_field_is_the_default(architecture, field):
    absent = without(architecture, field)
    if is_required(architecture, field):
        assert read(absent) is None
        return
    config = theirs(architecture, absent)
    assert config is not None
    if not hasattr(config, field):
        assert field in SPELLINGS | {"head_dim", "layer_types", "original_max_position_embeddings"}
        return
    default = getattr(config, field)
    assert read(absent) == read(absent | {field: default}), default


@pytest.mark.parametrize(("architecture", "field"), cases(of_rope=False))
def test_null_is_what_it_is_to_transformers(architecture, field):
    absent = without(architecture, field)
    null = absent | {field: None}
    config = theirs(architecture, null)
    if is_required(architecture, field):
        assert read(null) is None
    elif config is not None and getattr(config, field, None) is not None:
        assert read(null) == read(absent | {field: getattr(config, field)})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_missing_rotary_embedding_is_the_default(architecture):
    base = {name: value for name, value in BASES[architecture].items() if name not in ROPE}
    config = theirs(architecture, base)
    if read(base).rope is None:
        assert not getattr(config, "rope_parameters", None)
        return
    ropes = config.rope_parameters
    assert read(base) == read(base | {"rope_parameters": ropes}), ropes
    thetas = {rope.theta for rope in read(base).ropes}
    flat = ropes.values() if "rope_theta" not in ropes else [ropes]
    assert thetas <= {rope["rope_theta"] for rope in flat}
