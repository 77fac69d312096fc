"""Qwen3.5 (text): gated delta nets in three of four layers, gated attention, dense or experts.

Positions have three axes, which are equal for text.
"""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import TRAINING_FIELDS, num_experts
from rjax.models.families.expert_weights import expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.gated_delta_fields import (
    HYBRID_CONSTRAINTS,
    HYBRID_FIELDS,
    HYBRID_IGNORED,
    hybrid_weights,
    no_further_tokens,
    read_hybrid_config,
)
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_IGNORED = HYBRID_IGNORED | {"mlp_only_layers", "sliding_window", "use_sliding_window"}


def _read_dense(fields: ConfigFields) -> ModelConfig:
    return read_hybrid_config(fields, "Qwen3_5ForCausalLM", num_kv_heads=4)


def _read_experts(fields: ConfigFields) -> ModelConfig:
    width: int = fields.integer("moe_intermediate_size", 512)
    config = read_hybrid_config(
        fields, "Qwen3_5MoeForCausalLM", num_kv_heads=2, intermediate_size=width
    )
    experts, top_k = num_experts(fields, ("num_experts",), 256, 8)
    return dataclasses.replace(
        config,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=width,
            layers=(True,) * config.num_layers,
            router=Router(renormalise=True),
            shared_width=fields.integer("shared_expert_intermediate_size", 512),
            shared_gate=True,
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return hybrid_weights(config, fused=False)


def _weights_of_each(config: ModelConfig) -> Weights:
    return hybrid_weights(config, fused=False) | expert_weights(config)


def _fused_weights(config: ModelConfig) -> Weights:
    return hybrid_weights(config, fused=False) | fused_expert_weights(config)


QWEN3_5 = Family(
    "Qwen3_5ForCausalLM",
    "Qwen3.5 (dense, text)",
    field_table(
        ["qwen3_5_text"],
        reads=HYBRID_FIELDS,
        constraints=HYBRID_CONSTRAINTS,
        ignores=_IGNORED,
    ),
    _read_dense,
    _weights,
    unused=no_further_tokens,
)

QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM",
    "Qwen3.5 (mixture of experts, text), such as 35B-A3B",
    field_table(
        ["qwen3_5_moe_text"],
        reads=(HYBRID_FIELDS - {"intermediate_size"})
        | {"moe_intermediate_size", "num_experts", "num_experts_per_tok"}
        | {"shared_expert_intermediate_size"},
        constraints=HYBRID_CONSTRAINTS,
        ignores=_IGNORED | TRAINING_FIELDS | {"intermediate_size"},
    ),
    _read_experts,
    _weights_of_each,
    fused_weights=_fused_weights,
    unused=no_further_tokens,
)
