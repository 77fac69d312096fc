"""GLM-4: sandwich norms, interleaved rotary embedding on half of the dims."""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    PRE_NORMS,
    fuse_gate_up,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.pieces import Weights

_NORMS = PRE_NORMS | {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Glm4ForCausalLM",
        head_dim=128,
        num_kv_heads=2,
        norm_eps=1.5625e-7,
        rope=RopeRules(partial=True, part=0.5, interleaved=True),
    )
    return dataclasses.replace(
        config,
        qkv_bias=fields.flag("attention_bias", True),
        norms=NormConfig("sandwich"),
    )


def _weights(config: ModelConfig) -> Weights:
    return fuse_gate_up(llama_weights(config, _NORMS), config)


GLM4 = Family(
    "Glm4ForCausalLM",
    "GLM-4 (0414)",
    field_table(
        ["glm4"],
        reads=LLAMA_FIELDS | {"attention_bias", "partial_rotary_factor"},
        constraints=NO_WINDOWS,
        ignores=["initializer_range"],
    ),
    _read,
    _weights,
)
