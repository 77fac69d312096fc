"""OLMoE: Llama with experts in every layer, and norms of queries and keys over all heads."""

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
from rjax.models.families.expert_weights import expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, absent, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "OlmoeForCausalLM", norm_eps=1e-5)
    bias = fields.flag("attention_bias", False)
    experts, top_k = num_experts(fields, EXPERTS, 64, 8)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norms=NormConfig(whole_qk=True),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(renormalise=fields.flag("norm_topk_prob", False)),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config)


OLMOE = Family(
    "OlmoeForCausalLM",
    "OLMoE",
    field_table(
        ["olmoe"],
        reads=LLAMA_FIELDS | NUM_EXPERTS_FIELDS | {"attention_bias", "norm_topk_prob"},
        constraints={
            "clip_qkv": absent("clipped queries, keys and values are not supported"),
            **NO_WINDOWS,
            **WHOLE_ROTATION,
        },
        ignores=TRAINING_FIELDS | {"initializer_range"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
