"""Qwen3-MoE: Qwen3 with experts in some layers or all."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import (
    EXPERTS,
    NUM_EXPERTS_FIELDS,
    SPARSE_LAYER_FIELDS,
    TRAINING_FIELDS,
    num_experts,
    sparse_layers,
)
from rjax.models.families.expert_weights import expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.windows import uniform_window
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Qwen3MoeForCausalLM", num_kv_heads=4)
    bias = fields.flag("attention_bias", False)
    used = fields.flag("use_sliding_window", False)
    window = uniform_window(fields, config.num_layers, 4096)
    experts, top_k = num_experts(fields, EXPERTS, 128, 8)
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=window if used else (None,) * config.num_layers,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=fields.integer("moe_intermediate_size", 768),
            layers=sparse_layers(fields, config.num_layers),
            router=Router(renormalise=fields.flag("norm_topk_prob", False)),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config)


QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "Qwen3 (mixture of experts), such as 30B-A3B",
    field_table(
        ["qwen3_moe"],
        reads=LLAMA_FIELDS
        | NUM_EXPERTS_FIELDS
        | SPARSE_LAYER_FIELDS
        | {"attention_bias", "moe_intermediate_size", "norm_topk_prob"}
        | {"sliding_window", "use_sliding_window"},
        constraints={"layer_types": NO_WINDOWS["layer_types"], **WHOLE_ROTATION},
        ignores=TRAINING_FIELDS | {"initializer_range", "max_window_layers"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
