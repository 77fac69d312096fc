"""Mistral and Ministral: Llama with a sliding window on all layers or on some.

transformers reads a Mistral config with ``layer_types`` as Ministral. Without that field both
compute the same, so both architectures use one reader.
"""

import dataclasses
import functools

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
from rjax.models.families.windows import typed_windows

_FIELDS = field_table(
    ["mistral", "ministral"],
    reads=LLAMA_FIELDS | {"layer_types", "sliding_window"},
    constraints=WHOLE_ROTATION,
    ignores=["initializer_range"],
)


def _read(fields: ConfigFields, architecture: str) -> ModelConfig:
    config = read_llama_config(fields, architecture, num_kv_heads=8)
    return dataclasses.replace(
        config, sliding_windows=typed_windows(fields, config.num_layers, 4096)
    )


def _family(architecture: str, models: str) -> Family:
    read = functools.partial(_read, architecture=architecture)
    return Family(architecture, models, _FIELDS, read, llama_weights)


MISTRAL = _family("MistralForCausalLM", "Mistral 7B and Nemo")
MINISTRAL = _family("MinistralForCausalLM", "Ministral")
