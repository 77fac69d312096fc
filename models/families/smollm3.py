"""SmolLM3: Llama without rotary embedding on some layers."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import typed_windows


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "SmolLM3ForCausalLM",
        num_kv_heads=4,
        tie_embeddings=True,
        rope=RopeRules(theta=2e6),
    )
    rotated = _rotated(fields, config.num_layers)
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        sliding_windows=_windows(fields, rotated),
        layer_ropes=tuple(config.rope if one else None for one in rotated),
    )


def _rotated(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has a rotary embedding."""
    flags = fields.integers("no_rope_layers")
    if not fields.has("no_rope_layers"):
        interval = fields.integer("no_rope_layer_interval", 4)
        return tuple((i + 1) % interval != 0 for i in range(num_layers))
    if len(flags) < num_layers:
        fields.refuse("no_rope_layers", f"a list of at least {num_layers} entries, one a layer")
    return tuple(map(bool, flags[:num_layers]))


def _windows(fields: ConfigFields, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """``layer_types``, else the layers without rotary embedding, if windows are used at all."""
    if not fields.flag("use_sliding_window", False):
        if "sliding_attention" in (fields.texts("layer_types") or ()):
            fields.refuse("layer_types", "full_attention for each layer without use_sliding_window")
        return (None,) * len(rotated)
    if fields.has("layer_types"):
        return typed_windows(fields, len(rotated), None)
    window = fields.integer("sliding_window", None)
    return tuple(None if one else window for one in rotated)


SMOLLM3 = Family(
    "SmolLM3ForCausalLM",
    "SmolLM3",
    field_table(
        ["smollm3"],
        reads=LLAMA_FIELDS
        | {
            "attention_bias",
            "layer_types",
            "mlp_bias",
            "no_rope_layer_interval",
            "no_rope_layers",
            "sliding_window",
            "use_sliding_window",
        },
        constraints=WHOLE_ROTATION,
        ignores=["initializer_range"],
    ),
    _read,
    llama_weights,
)
