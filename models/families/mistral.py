"""Mistral: Llama with one sliding window on every layer."""

import dataclasses

from models.config import ModelConfig
from models.config_fields import ConfigFields
from models.families.family import Family
from models.families.llama import llama_weights, read_llama_config
from models.families.windows import uniform_window


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "MistralForCausalLM", num_kv_heads=8)
    return dataclasses.replace(
        config, sliding_windows=uniform_window(fields, config.num_layers, 4096)
    )


MISTRAL = Family("MistralForCausalLM", _read, llama_weights)
