"""Seed-OSS: Llama with biases on queries, keys and values, and an independent head dim."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "SeedOssForCausalLM",
        head_dim=None if fields.given("head_dim") else 128,
        num_kv_heads=8,
    )
    return dataclasses.replace(
        config,
        qkv_bias=fields.flag("attention_bias", True),
        output_bias=fields.flag("attention_out_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
    )


SEED_OSS = Family(
    "SeedOssForCausalLM",
    "Seed-OSS",
    field_table(
        ["seed_oss"],
        reads=LLAMA_FIELDS | {"attention_bias", "attention_out_bias", "mlp_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range", "pretraining_tp", "residual_dropout"],
    ),
    _read,
    llama_weights,
)
