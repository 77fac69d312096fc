"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values, and a window on some layers."""

import dataclasses

from models.config import ModelConfig
from models.config_fields import ConfigFields
from models.families.family import Family
from models.families.llama import llama_weights, read_llama_config
from models.families.windows import layer_windows


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Qwen2ForCausalLM", num_kv_heads=32)
    return dataclasses.replace(
        config, qkv_bias=True, sliding_windows=layer_windows(fields, config.num_layers)
    )


QWEN2 = Family("Qwen2ForCausalLM", _read, llama_weights)
