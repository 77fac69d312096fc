"""The text models of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2, Qwen3 and Qwen3-MoE with defaults
of their own.

Their rotary embeddings have positions of three axes, which are equal for text: it is then the plain
one, whatever the sections of the axes.
"""

import dataclasses
import functools

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
from rjax.models.families.field_table import HEAD_DIM_OF_SIZE, NO_WINDOWS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import LAYER_WINDOW_FIELDS, layer_windows
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_QWEN2_ROPE = RopeRules(theta=1e6, aliases=(("mrope", "default"),))
_QWEN3_ROPE = RopeRules(theta=5e5)


def _read_qwen2(fields: ConfigFields, architecture: str) -> ModelConfig:
    config = read_llama_config(
        fields,
        architecture,
        has_head_dim=False,
        num_kv_heads=8,
        norm_eps=1e-5,
        rope=_QWEN2_ROPE,
    )
    windows = layer_windows(fields, config.num_layers, first=80)
    return dataclasses.replace(config, qkv_bias=True, sliding_windows=windows)


def _read_qwen3(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields, "Qwen3VLTextModel", num_kv_heads=32, head_dim=128, rope=_QWEN3_ROPE
    )
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(config, qk_norm=True, qkv_bias=bias, output_bias=bias)


def _read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Qwen3VLMoeTextModel", num_kv_heads=16, rope=_QWEN3_ROPE)
    bias = fields.flag("attention_bias", False)
    experts, top_k = num_experts(fields, EXPERTS, 60, 4)
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=fields.integer("moe_intermediate_size", 1408),
            layers=sparse_layers(fields, config.num_layers),
            router=Router(renormalise=True),
        ),
    )


def _moe_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config)


def _fused_weights(config: ModelConfig, *, inputs_first: bool) -> Weights:
    return llama_weights(config) | fused_expert_weights(config, inputs_first=inputs_first)


def _qwen2(version: str, architecture: str, model_type: str) -> Family:
    return Family(
        architecture,
        version,
        field_table(
            [model_type],
            reads=(LLAMA_FIELDS - {"head_dim"}) | LAYER_WINDOW_FIELDS,
            constraints={**HEAD_DIM_OF_SIZE, **WHOLE_ROTATION},
            ignores=["initializer_range"],
        ),
        functools.partial(_read_qwen2, architecture=architecture),
        llama_weights,
    )


QWEN2_VL_TEXT = _qwen2("Qwen2-VL", "Qwen2VLTextModel", "qwen2_vl_text")
QWEN2_5_VL_TEXT = _qwen2("Qwen2.5-VL", "Qwen2_5_VLTextModel", "qwen2_5_vl_text")
QWEN3_VL_TEXT = Family(
    "Qwen3VLTextModel",
    "Qwen3-VL (dense)",
    field_table(
        ["qwen3_vl_text"],
        reads=LLAMA_FIELDS | {"attention_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read_qwen3,
    llama_weights,
)
QWEN3_VL_MOE_TEXT = Family(
    "Qwen3VLMoeTextModel",
    "Qwen3-VL (mixture of experts)",
    field_table(
        ["qwen3_vl_moe_text"],
        reads=LLAMA_FIELDS
        | NUM_EXPERTS_FIELDS
        | SPARSE_LAYER_FIELDS
        | {"attention_bias", "moe_intermediate_size"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        # The weights of the chosen experts always sum to 1.
        ignores=TRAINING_FIELDS | {"initializer_range", "norm_topk_prob"},
    ),
    _read_qwen3_moe,
    _moe_weights,
    fused_weights=functools.partial(_fused_weights, inputs_first=False),
    transposed_weights=functools.partial(_fused_weights, inputs_first=True),
)
