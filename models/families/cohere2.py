"""Cohere 2 (Command R7B, Command A): attention and feed-forward side by side after one LayerNorm.

Layers with windows have an interleaved rotary embedding, the others none.
"""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig, ScaleConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    PRE_NORMS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import patterned_windows
from rjax.models.loading.pieces import Weights

_NORMS = {"attention_norm": PRE_NORMS["attention_norm"]}


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Cohere2ForCausalLM",
        has_head_dim=False,
        norm_eps=1e-5,
        tie_embeddings=True,
        names={"rms_norm_eps": "layer_norm_eps"},
        rope=RopeRules(interleaved=True),
    )
    pattern = fields.integer("sliding_window_pattern", 4)
    kinds, windows = patterned_windows(fields, config.num_layers, window=4096, pattern=pattern)
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        layer_norm=True,
        norms=NormConfig("parallel", bias=False),
        scales=ScaleConfig(logits=fields.number("logit_scale", 0.0625)),
        sliding_windows=windows,
        layer_ropes=tuple(config.rope if kind == "sliding_attention" else None for kind in kinds),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config, _NORMS)


COHERE2 = Family(
    "Cohere2ForCausalLM",
    "Command R7B and Command A",
    field_table(
        ["cohere2"],
        reads=(LLAMA_FIELDS - {"head_dim", "rms_norm_eps"})
        | {
            "attention_bias",
            "layer_norm_eps",
            "layer_types",
            "logit_scale",
            "sliding_window",
            "sliding_window_pattern",
        },
        constraints=WHOLE_ROTATION,
        ignores=["head_dim", "initializer_range"],
    ),
    _read,
    _weights,
)
