"""Qwen3-Next: gated delta nets in three of four layers, gated attention, many small experts."""

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


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_hybrid_config(fields, "Qwen3NextForCausalLM", num_kv_heads=2)
    experts, top_k = num_experts(fields, ("num_experts",), 512, 10)
    return dataclasses.replace(
        config,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=fields.integer("moe_intermediate_size", 512),
            layers=sparse_layers(fields, config.num_layers),
            router=Router(renormalise=fields.flag("norm_topk_prob", True)),
            shared_width=fields.integer("shared_expert_intermediate_size", 512),
            shared_gate=True,
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return hybrid_weights(config, fused=True) | expert_weights(config)


def _fused_weights(config: ModelConfig) -> Weights:
    return hybrid_weights(config, fused=True) | fused_expert_weights(config)


QWEN3_NEXT = Family(
    "Qwen3NextForCausalLM",
    "Qwen3-Next, such as 80B-A3B",
    field_table(
        ["qwen3_next"],
        reads=HYBRID_FIELDS
        | SPARSE_LAYER_FIELDS
        | {"moe_intermediate_size", "norm_topk_prob", "num_experts", "num_experts_per_tok"}
        | {"shared_expert_intermediate_size"},
        constraints=HYBRID_CONSTRAINTS,
        ignores=HYBRID_IGNORED | TRAINING_FIELDS | {"sliding_window", "use_sliding_window"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
    unused=no_further_tokens,
)
