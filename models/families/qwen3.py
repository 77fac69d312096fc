"""Qwen3: Llama with RMSNorm on queries and keys, and an independent head dim."""

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
    config = read_llama_config(fields, "Qwen3ForCausalLM", num_kv_heads=32, head_dim=128)
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=layer_windows(fields, config.num_layers),
    )


QWEN3 = Family(
    "Qwen3ForCausalLM",
    "Qwen3 (dense)",
    field_table(
        ["qwen3"],
        reads=LLAMA_FIELDS | LAYER_WINDOW_FIELDS | {"attention_bias"},
        constraints=WHOLE_ROTATION,
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
