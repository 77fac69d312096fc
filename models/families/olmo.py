"""OLMo 2 and 3: norms on the outputs of attention and feed-forward, and on all heads at once.

OLMo 3 has windows, and scales its rotary embedding on layers with full attention only.
"""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import (
    DEFAULT_ROPE,
    LLAMA_FIELDS,
    POST_NORMS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import OUTER_ROPE_FIELDS, RopeRules, read_layer_ropes
from rjax.models.families.windows import patterned_windows
from rjax.models.loading.pieces import Weights

_THETA = 5e5


def _read(fields: ConfigFields, architecture: str, rope: RopeRules | None) -> ModelConfig:
    config = read_llama_config(fields, architecture, norm_eps=1e-5, rope=rope)
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        norms=NormConfig("post", whole_qk=True),
    )


def _read_olmo2(fields: ConfigFields) -> ModelConfig:
    return _read(fields, "Olmo2ForCausalLM", DEFAULT_ROPE)


def _read_olmo3(fields: ConfigFields) -> ModelConfig:
    config = _read(fields, "Olmo3ForCausalLM", None)
    kinds, windows = patterned_windows(fields, config.num_layers, window=4096, pattern=4)
    # transformers gives an outer rope_theta to layers with full attention only.
    thetas = {
        "full_attention": fields.number("rope_theta", _THETA),
        "sliding_attention": _THETA,
    }
    ropes = read_layer_ropes(fields, config.head_dim, config.max_position_embeddings, thetas)
    return dataclasses.replace(
        config,
        sliding_windows=windows,
        rope=ropes["full_attention"],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config, POST_NORMS)


OLMO2 = Family(
    "Olmo2ForCausalLM",
    "OLMo 2",
    field_table(
        ["olmo2"],
        reads=LLAMA_FIELDS | {"attention_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range"],
    ),
    _read_olmo2,
    _weights,
)
OLMO3 = Family(
    "Olmo3ForCausalLM",
    "OLMo 3",
    field_table(
        ["olmo3"],
        reads=(LLAMA_FIELDS - OUTER_ROPE_FIELDS)
        | {"attention_bias", "layer_types", "sliding_window"},
        constraints=WHOLE_ROTATION,
        ignores={"initializer_range"} | OUTER_ROPE_FIELDS,
    ),
    _read_olmo3,
    _weights,
)
