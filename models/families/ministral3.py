"""Ministral 3: Llama with yarn and queries that are scaled by their position."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import UNIFORM_LAYERS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import uniform_window

_ROPE = {
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Settings of the rotary embedding where config.json has none."""


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields.filled(rope_parameters=_ROPE),
        "Ministral3ForCausalLM",
        head_dim=None if fields.given("head_dim") else 128,
        num_kv_heads=8,
        norm_eps=1e-5,
        rope=RopeRules(scales_queries=True),
    )
    return dataclasses.replace(
        config, sliding_windows=uniform_window(fields, config.num_layers, None)
    )


MINISTRAL3 = Family(
    "Ministral3ForCausalLM",
    "Ministral 3 (text)",
    field_table(
        ["ministral3"],
        reads=LLAMA_FIELDS | {"sliding_window"},
        constraints={**UNIFORM_LAYERS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
