"""Granite 3 with experts: Granite with a router over the logits of the chosen experts."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_fields import TRAINING_FIELDS, num_experts
from rjax.models.families.expert_weights import expert_layers
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.granite import GRANITE_SCALES, read_granite_scales
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.loading.pieces import Piece, Weights
from rjax.pallas_kernels.experts.base import Router


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "GraniteMoeForCausalLM")
    bias = fields.flag("attention_bias", False)
    experts, top_k = num_experts(fields, ("num_local_experts",), 8, 2)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        scales=read_granite_scales(fields),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=top_k,
            width=config.intermediate_size,
            layers=(True,) * config.num_layers,
            router=Router(score="softmax_of_topk"),
        ),
    )


def _with_experts(config: ModelConfig, router: str, up: str, down: str) -> Weights:
    weights = llama_weights(config)
    for i in expert_layers(config):
        ours, theirs = f"layers.{i}.mlp.", f"model.layers.{i}."
        weights |= {
            ours + "router": (Piece(theirs + router, "J D"),),
            ours + "up.weight": (Piece(theirs + up, "J (A I) D", a=2),),
            ours + "down.weight": (Piece(theirs + down, "J D I"),),
        }
    return weights


def _weights(config: ModelConfig) -> Weights:
    block = "block_sparse_moe."
    names = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
    return _with_experts(config, *(block + name for name in names))


def _fused_weights(config: ModelConfig) -> Weights:
    """The pieces with the tensor names of transformers 5."""
    block = "block_sparse_moe."
    names = ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    return _with_experts(config, *(block + name for name in names))


GRANITE_MOE = Family(
    "GraniteMoeForCausalLM",
    "Granite 3 (mixture of experts)",
    field_table(
        ["granitemoe"],
        reads=LLAMA_FIELDS
        | GRANITE_SCALES
        | {"attention_bias", "num_experts_per_tok", "num_local_experts"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=TRAINING_FIELDS | {"initializer_range"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
)
