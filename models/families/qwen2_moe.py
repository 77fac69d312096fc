"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, one of them shared by all rows."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import (
    SPARSE_LAYER_FIELDS,
    TRAINING_FIELDS,
    num_experts,
    sparse_layers,
)
from rjax.models.families.expert_weights import expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.windows import LAYER_WINDOW_FIELDS, alternating_windows
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Qwen2MoeForCausalLM", num_kv_heads=16)
    experts, top_k = num_experts(fields, ("num_experts",), 60, 4)
    return dataclasses.replace(
        config,
        qkv_bias=fields.flag("qkv_bias", True),
        sliding_windows=alternating_windows(fields, config.num_layers),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=fields.integer("moe_intermediate_size", 1408),
            layers=sparse_layers(fields, config.num_layers),
            router=Router(renormalise=fields.flag("norm_topk_prob", False)),
            shared_width=fields.integer("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config)


QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    "Qwen1.5-MoE and Qwen2-57B-A14B",
    field_table(
        ["qwen2_moe"],
        reads=LLAMA_FIELDS
        | LAYER_WINDOW_FIELDS
        | {"num_experts", "num_experts_per_tok"}
        | SPARSE_LAYER_FIELDS
        | {"moe_intermediate_size", "norm_topk_prob", "qkv_bias"}
        | {"shared_expert_intermediate_size"},
        constraints=WHOLE_ROTATION,
        ignores=TRAINING_FIELDS | {"initializer_range"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
