"""MiniMax-M2: experts in every layer, norms of whole queries and keys, half rotated heads."""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import (
    EXPERTS,
    NUM_EXPERTS_FIELDS,
    TRAINING_FIELDS,
    num_experts,
)
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_NAMES = ExpertNames(
    "block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias"
)


def _read(fields: ConfigFields) -> ModelConfig:
    head_dim: int = fields.integer("head_dim", 128)
    # Published files have the number of rotated dims in place of their share.
    part = fields.integer("rotary_dim", head_dim) / head_dim
    config = read_llama_config(
        fields,
        "MiniMaxM2ForCausalLM",
        head_dim=head_dim,
        num_kv_heads=8,
        rope=RopeRules(theta=5e6, partial=True, part=part),
    )
    experts, top_k = num_experts(fields, EXPERTS[::-1], 256, 8)
    return dataclasses.replace(
        config,
        qk_norm=True,
        norms=NormConfig(whole_qk=True),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(score="sigmoid", renormalise=True, correction_bias=True),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config, _NAMES)


MINIMAX_M2 = Family(
    "MiniMaxM2ForCausalLM",
    "MiniMax-M2",
    field_table(
        ["minimax_m2"],
        reads=LLAMA_FIELDS | NUM_EXPERTS_FIELDS | {"partial_rotary_factor", "rotary_dim"},
        constraints=NO_WINDOWS,
        ignores=TRAINING_FIELDS | {"initializer_range", "router_jitter_noise"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
