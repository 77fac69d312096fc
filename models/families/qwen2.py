"""Qwen2 and Qwen2.5: Llama with QKV bias and a sliding window on some layers."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.windows import LAYER_WINDOW_FIELDS, layer_windows


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Qwen2ForCausalLM", num_kv_heads=32)
    return dataclasses.replace(
        config, qkv_bias=True, sliding_windows=layer_windows(fields, config.num_layers)
    )


QWEN2 = Family(
    "Qwen2ForCausalLM",
    "Qwen2 and Qwen2.5",
    field_table(
        ["qwen2"],
        reads=LLAMA_FIELDS | LAYER_WINDOW_FIELDS,
        constraints=WHOLE_ROTATION,
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
