"""Granite 3: Llama with factors on embeddings, scores, residual updates and logits."""

import dataclasses

from rjax.models.config import ModelConfig, ScaleConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)


def read_granite_scales(fields: ConfigFields) -> ScaleConfig:
    """The four multipliers; the logits are divided by theirs."""
    return ScaleConfig(
        attention=fields.number("attention_multiplier", 1.0),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=1 / fields.number("logits_scaling", 1.0),
    )


GRANITE_SCALES = frozenset(
    {"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}
)
"""Fields that `read_granite_scales` reads."""


def _read(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        read_llama_config(fields, "GraniteForCausalLM"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        scales=read_granite_scales(fields),
    )


GRANITE = Family(
    "GraniteForCausalLM",
    "Granite 3 (dense)",
    field_table(
        ["granite"],
        reads=LLAMA_FIELDS | GRANITE_SCALES | {"attention_bias", "mlp_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
