"""GLM-4.5 to 4.7: Llama with half rotated heads, then layers with experts and a shared expert."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.expert_fields import (
    ROUTED_EXPERT_FIELDS,
    SIGMOID_ROUTER_FIELDS,
    TRAINING_FIELDS,
    layers_after_dense,
    read_routed_experts,
    read_sigmoid_router,
)
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family, layers_after_the_last
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.pieces import Weights

_NAMES = ExpertNames(shared="shared_experts")


def _read(fields: ConfigFields) -> ModelConfig:
    rope = RopeRules(partial=True, part=0.5)
    config = read_llama_config(
        fields, "Glm4MoeForCausalLM", num_kv_heads=8, norm_eps=1e-5, rope=rope
    )
    return dataclasses.replace(
        config,
        qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        experts=read_routed_experts(
            fields,
            layers_after_dense(fields, config.num_layers, 1),
            read_sigmoid_router(fields, 1.0),
            experts=128,
            top_k=8,
            width=1408,
            shared=1,
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config, _NAMES)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5, 4.6 and 4.7",
    field_table(
        ["glm4_moe"],
        reads=LLAMA_FIELDS
        | ROUTED_EXPERT_FIELDS
        | SIGMOID_ROUTER_FIELDS
        | {"attention_bias", "first_k_dense_replace", "num_local_experts"}
        | {"partial_rotary_factor", "use_qk_norm"},
        constraints=NO_WINDOWS,
        ignores=TRAINING_FIELDS
        | {"initializer_range", "num_mtp_layers", "num_nextn_predict_layers"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
    unused=layers_after_the_last,
)
