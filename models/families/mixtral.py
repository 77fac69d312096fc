"""Mixtral: Mistral with experts in every layer."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import (
    LOCAL_EXPERTS,
    NUM_EXPERTS_FIELDS,
    TRAINING_FIELDS,
    num_experts,
)
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import uniform_window
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields, "MixtralForCausalLM", num_kv_heads=8, norm_eps=1e-5, rope=RopeRules(theta=1e6)
    )
    experts, top_k = num_experts(fields, LOCAL_EXPERTS, 8, 2)
    return dataclasses.replace(
        config,
        sliding_windows=uniform_window(fields, config.num_layers, None),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(renormalise=True),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config)


MIXTRAL = Family(
    "MixtralForCausalLM",
    "Mixtral 8x7B and 8x22B",
    field_table(
        ["mixtral"],
        reads=LLAMA_FIELDS | NUM_EXPERTS_FIELDS | {"sliding_window"},
        constraints={"layer_types": NO_WINDOWS["layer_types"], **WHOLE_ROTATION},
        ignores=TRAINING_FIELDS | {"initializer_range", "router_jitter_noise"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
