"""HunYuan V1: Llama with norms of queries and keys behind the rotary embedding, dense or with
experts in every layer beside a shared one."""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import TRAINING_FIELDS
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, FieldTable, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_EXPERTS = ("num_local_experts", "num_experts")
_OF_ROW = ("num_experts_per_tok", "moe_topk")
_NAMES = ExpertNames(shared="shared_mlp", router="gate.wg")
_IGNORED = frozenset({"eod_token_id", "initializer_range", "pretraining_tp", "sep_token_id"})
_HEAD_NORMS = {".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."}


def _read(fields: ConfigFields, architecture: str = "HunYuanDenseV1ForCausalLM") -> ModelConfig:
    config = read_llama_config(
        fields, architecture, norm_eps=1e-5, rope=RopeRules(stretches_base=True)
    )
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        norms=NormConfig(qk_behind_rope=True),
    )


def _read_moe(fields: ConfigFields) -> ModelConfig:
    config = _read(fields, "HunYuanMoEV1ForCausalLM")
    name = next((name for name in _EXPERTS if fields.has(name)), _EXPERTS[-1])
    experts: int = fields.integer(name, 1)
    return dataclasses.replace(
        config,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=_experts_of_row(fields, config.num_layers, experts),
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(renormalise=True),
            shared_width=config.intermediate_size,
        ),
    )


def _experts_of_row(fields: ConfigFields, num_layers: int, experts: int) -> int:
    """``moe_topk``: a number, or the same one for each layer."""
    name = next((name for name in _OF_ROW if fields.has(name)), _OF_ROW[-1])
    found = fields.raw(name)
    if isinstance(found, list):
        counts = fields.integers(name)[:num_layers]
        if len(counts) < num_layers or len(set(counts)) != 1 or not 1 <= counts[0] <= experts:
            fields.refuse(name, f"a number up to {experts}, the same for each layer")
        return counts[0]
    return fields.integer(name, 1, maximum=experts)


def _weights(config: ModelConfig) -> Weights:
    def renamed(tensor: str) -> str:
        for ours, theirs in _HEAD_NORMS.items():
            tensor = tensor.replace(ours, theirs)
        return tensor

    return {
        path: tuple(dataclasses.replace(piece, tensor=renamed(piece.tensor)) for piece in pieces)
        for path, pieces in llama_weights(config).items()
    }


def _moe_weights(config: ModelConfig) -> Weights:
    return _weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return _weights(config) | fused_expert_weights(config, _NAMES)


def _fields(model_type: str, reads: frozenset[str], ignores: frozenset[str]) -> FieldTable:
    return field_table(
        [model_type],
        reads=LLAMA_FIELDS | {"attention_bias"} | reads,
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=_IGNORED | ignores,
        rope_fields={"alpha"},
    )


HUNYUAN_DENSE = Family(
    "HunYuanDenseV1ForCausalLM",
    "HunYuan V1 (dense), such as 7B",
    _fields("hunyuan_v1_dense", frozenset(), frozenset()),
    _read,
    _weights,
)
HUNYUAN_MOE = Family(
    "HunYuanMoEV1ForCausalLM",
    "HunYuan V1 (mixture of experts), such as A13B",
    _fields("hunyuan_v1_moe", frozenset({*_EXPERTS, *_OF_ROW}), TRAINING_FIELDS),
    _read_moe,
    _moe_weights,
    fused_weights=_fused_weights,
)
