"""Gemma 2 and 3 (text): sandwich norms with a unit offset, scaled embeddings, windows.

Gemma 2 has soft caps. Gemma 3 has norms on queries and keys, and a rotary embedding for each type
of layer.
"""

import dataclasses
import math

from rjax.models.config import ModelConfig, NormConfig, ScaleConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import Constraint, field_table
from rjax.models.families.llama import (
    DEFAULT_ROPE,
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import OUTER_ROPE_FIELDS, RopeRules, read_layer_ropes
from rjax.models.families.windows import patterned_windows
from rjax.models.loading.pieces import Weights

GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""The checkpoint's names of a layer's norms."""
_FIELDS = (LLAMA_FIELDS - {"hidden_act"}) | {
    "attention_bias",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
}
_CONSTRAINTS = {
    "use_bidirectional_attention": Constraint(
        lambda value, _: value is False, "false: a token sees no later token"
    )
}


def _read(
    fields: ConfigFields,
    architecture: str,
    *,
    rope: RopeRules | None,
    pattern: int,
    logit_cap: float | None,
) -> ModelConfig:
    config = read_llama_config(
        fields,
        architecture,
        head_dim=256,
        num_kv_heads=4,
        tie_embeddings=True,
        activation="gelu_pytorch_tanh",
        names={"hidden_act": "hidden_activation"},
        rope=rope,
    )
    bias = fields.flag("attention_bias", False)
    _, windows = patterned_windows(fields, config.num_layers, window=4096, pattern=pattern)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=windows,
        norms=NormConfig("sandwich", unit_offset=True),
        scales=ScaleConfig(
            attention=fields.integer("query_pre_attn_scalar", 256) ** -0.5,
            embedding=math.sqrt(config.hidden_size),
            logit_soft_cap=_cap(fields, "final_logit_softcapping", logit_cap),
        ),
    )


def _cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """A soft cap; null means none, a missing field means the default."""
    return fields.number(name, None if fields.given(name) else default)


def _read_gemma2(fields: ConfigFields) -> ModelConfig:
    config = _read(
        fields,
        "Gemma2ForCausalLM",
        rope=DEFAULT_ROPE,
        pattern=2,
        logit_cap=30.0,
    )
    cap = _cap(fields, "attn_logit_softcapping", 50.0)
    scales = dataclasses.replace(config.scales, attention_soft_cap=cap)
    return dataclasses.replace(config, scales=scales)


def _read_gemma3(fields: ConfigFields) -> ModelConfig:
    config = _read(
        fields,
        "Gemma3ForCausalLM",
        rope=None,
        pattern=fields.integer("sliding_window_pattern", 6),
        logit_cap=None,
    )
    thetas = {
        "full_attention": fields.number("rope_theta", 1e6),
        "sliding_attention": fields.number("rope_local_base_freq", 1e4),
    }
    ropes = read_layer_ropes(fields, config.head_dim, config.max_position_embeddings, thetas)
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    return dataclasses.replace(
        config,
        qk_norm=True,
        declares_stretched=True,
        rope=full,
        layer_ropes=tuple(full if window is None else sliding for window in config.sliding_windows),
    )


def _read_gemma3_without_cap(fields: ConfigFields) -> ModelConfig:
    config = _read_gemma3(fields)
    scales = dataclasses.replace(config.scales, logit_soft_cap=None)
    return dataclasses.replace(config, scales=scales)


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config, GEMMA_NORMS)


GEMMA2 = Family(
    "Gemma2ForCausalLM",
    "Gemma 2",
    field_table(
        ["gemma2"],
        reads=_FIELDS | {"attn_logit_softcapping"},
        constraints={**_CONSTRAINTS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read_gemma2,
    _weights,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "Gemma 3 (text)",
    field_table(
        ["gemma3_text"],
        reads=(_FIELDS - OUTER_ROPE_FIELDS) | {"rope_local_base_freq", "sliding_window_pattern"},
        constraints={**_CONSTRAINTS, **WHOLE_ROTATION},
        # transformers knows the soft cap of scores and does not apply it.
        ignores={"_sliding_window_pattern", "attn_logit_softcapping", "initializer_range"}
        | OUTER_ROPE_FIELDS,
    ),
    _read_gemma3,
    _weights,
)
GEMMA3_TEXT = dataclasses.replace(GEMMA3, read_config=_read_gemma3_without_cap)
"""The text model of Gemma 3 with vision, whose logits transformers does not cap."""
