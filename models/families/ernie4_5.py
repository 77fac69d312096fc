"""ERNIE 4.5: Llama with an interleaved rotary embedding, and experts behind the first layers.

The router chooses by the softmax and a bias, and weighs by the softmax alone.
"""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import TRAINING_FIELDS, num_experts
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, Constraint, field_table, one_of
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_ROPE = RopeRules(theta=5e5, interleaved=True)
_NORM_MIN = 1e-12
_FUSED_NAMES = ExpertNames(
    shared="shared_experts", correction="gate.moe_statics.e_score_correction_bias", rows="A J"
)
_NAMES = dataclasses.replace(_FUSED_NAMES, correction="moe_statics.e_score_correction_bias")
_MOE_FIELDS = frozenset(
    {
        *("moe_intermediate_size", "moe_k", "moe_layer_end_index", "moe_layer_interval"),
        *("moe_layer_start_index", "moe_num_experts", "moe_num_shared_experts"),
        *("num_experts", "num_experts_per_tok"),
    }
)


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Ernie4_5ForCausalLM",
        head_dim=None if fields.given("head_dim") else 128,
        num_kv_heads=2,
        norm_eps=1e-5,
        tie_embeddings=True,
        rope=_ROPE,
    )
    bias = fields.flag("use_bias", False)
    return dataclasses.replace(config, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def _read_moe(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Ernie4_5_MoeForCausalLM",
        num_kv_heads=4,
        norm_eps=1e-5,
        tie_embeddings=True,
        rope=_ROPE,
    )
    last = config.num_layers - 1
    first: int = fields.integer("moe_layer_start_index", 1, minimum=0)
    end: int = fields.integer("moe_layer_end_index", -1, minimum=-1)
    step: int = fields.integer("moe_layer_interval", 1)
    end = last if end == -1 else end
    experts, top_k = num_experts(
        fields, ("num_experts", "moe_num_experts"), 64, 6, ("num_experts_per_tok", "moe_k")
    )
    width: int = fields.integer("moe_intermediate_size", 1536)
    shared: int = fields.integer("moe_num_shared_experts", 2, minimum=0)
    return dataclasses.replace(
        config,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=width,
            layers=tuple(
                (i + 1) % step == 0 and first <= i <= end for i in range(config.num_layers)
            ),
            router=Router(renormalise=True, correction_bias=True),
            shared_width=width * shared or None,
        ),
    )


def _moe_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config, _FUSED_NAMES)


def _later_tokens(_: ModelConfig) -> tuple[str, ...]:
    """Modules that predict further tokens; they are not used."""
    return ("model.mtp_",)


ERNIE4_5 = Family(
    "Ernie4_5ForCausalLM",
    "ERNIE 4.5 (dense)",
    field_table(
        ["ernie4_5"],
        reads=LLAMA_FIELDS | {"use_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
ERNIE4_5_MOE = Family(
    "Ernie4_5_MoeForCausalLM",
    "ERNIE 4.5 (mixture of experts), such as 21B-A3B",
    field_table(
        ["ernie4_5_moe"],
        reads=LLAMA_FIELDS | _MOE_FIELDS,
        constraints={
            "moe_norm_min": Constraint(
                lambda value, _: type(value) in (int, float) and 0 <= value <= _NORM_MIN,
                f"at most {_NORM_MIN}: weights of experts are divided by their sum",
            ),
            "use_bias": one_of(False, why="biases of shared experts are not supported"),
            **NO_WINDOWS,
            **WHOLE_ROTATION,
        },
        ignores=TRAINING_FIELDS | {"initializer_range"},
    ),
    _read_moe,
    _moe_weights,
    fused_weights=_fused_weights,
    unused=_later_tokens,
)
