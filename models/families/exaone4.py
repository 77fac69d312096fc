"""EXAONE 4: norms on the outputs, norms on queries and keys, no rotary embedding on full layers."""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    POST_NORMS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.windows import patterned_windows
from rjax.models.loading.pieces import Weights


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(fields, "Exaone4ForCausalLM", num_kv_heads=32, norm_eps=1e-5)
    config = dataclasses.replace(config, qk_norm=True, norms=NormConfig("post"))
    if fields.given("sliding_window") and not fields.has("sliding_window"):
        if "sliding_attention" in (fields.texts("layer_types") or ()):
            fields.refuse("sliding_window", "the window of the layers with sliding_attention")
        return config
    pattern = None
    if not fields.has("layer_types"):
        pattern = fields.integer("sliding_window_pattern", 4)
    kinds, windows = patterned_windows(fields, config.num_layers, window=4096, pattern=pattern)
    return dataclasses.replace(
        config,
        sliding_windows=windows,
        layer_ropes=tuple(config.rope if kind == "sliding_attention" else None for kind in kinds),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config, POST_NORMS)


EXAONE4 = Family(
    "Exaone4ForCausalLM",
    "EXAONE 4",
    field_table(
        ["exaone4"],
        reads=LLAMA_FIELDS | {"layer_types", "sliding_window", "sliding_window_pattern"},
        constraints=WHOLE_ROTATION,
        ignores=["initializer_range"],
    ),
    _read,
    _weights,
)
