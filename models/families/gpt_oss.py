"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, windows on half the layers.

Published checkpoints store the experts in MXFP4.
"""

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
from rjax.models.families.expert_weights import expert_layers
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules, parse_rope
from rjax.models.families.windows import patterned_windows
from rjax.models.loading.pieces import Piece, Weights
from rjax.pallas_kernels.experts.base import Router

_DEFAULT_ROPE = ConfigFields(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    }
)


def _read(fields: ConfigFields) -> ModelConfig:
    theta = fields.number("rope_theta", 150000.0)
    scaled = any(fields.inner(name).names() for name in ("rope_scaling", "rope_parameters"))
    config = read_llama_config(
        fields,
        "GptOssForCausalLM",
        head_dim=64,
        num_kv_heads=8,
        norm_eps=1e-5,
        activation=None,
        rope=RopeRules(theta=theta) if scaled else None,
    )
    if not scaled:
        original = fields.integer("original_max_position_embeddings", None)
        sizes = config.head_dim, config.max_position_embeddings
        rope = parse_rope(
            _DEFAULT_ROPE, "rope_parameters", *sizes, RopeRules(theta=theta), original
        )
        config = dataclasses.replace(config, rope=rope)
    bias = fields.flag("attention_bias", True)
    _, windows = patterned_windows(fields, config.num_layers, window=128, pattern=2)
    experts, top_k = num_experts(fields, LOCAL_EXPERTS, 128, 4)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=windows,
        sinks=True,
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(score="softmax_of_topk", bias=True),
            bias=True,
            clamp=fields.number("swiglu_limit", 7.0),
            alpha=fields.number("swiglu_alpha", 1.702),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    """Gate and up are neighbouring columns."""
    weights = llama_weights(config)
    for i in expert_layers(config):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        router, experts = f"{theirs}mlp.router", f"{theirs}mlp.experts"
        weights |= {
            f"{ours}attention.sinks": (Piece(f"{theirs}self_attn.sinks", "N"),),
            f"{ours}mlp.router": (Piece(f"{router}.weight", "J D"),),
            f"{ours}mlp.router_bias": (Piece(f"{router}.bias", "J"),),
            f"{ours}mlp.up.weight": (Piece(f"{experts}.gate_up_proj", "J D (I A)", a=2),),
            f"{ours}mlp.up.bias": (Piece(f"{experts}.gate_up_proj_bias", "J (I A)", a=2),),
            f"{ours}mlp.down.weight": (Piece(f"{experts}.down_proj", "J I D"),),
            f"{ours}mlp.down.bias": (Piece(f"{experts}.down_proj_bias", "J D"),),
        }
    return weights


GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt-oss",
    field_table(
        ["gpt_oss"],
        reads=(LLAMA_FIELDS - {"hidden_act"})
        | NUM_EXPERTS_FIELDS
        | {"attention_bias", "layer_types", "sliding_window", "swiglu_alpha", "swiglu_limit"},
        constraints=WHOLE_ROTATION,
        ignores=TRAINING_FIELDS
        | {"experts_per_token", "hidden_act", "initial_context_length", "initializer_range"},
    ),
    _read,
    _weights,
)
