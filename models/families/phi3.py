"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, and perhaps longrope."""

import dataclasses
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import Constraint, field_table
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import uniform_window
from rjax.models.loading.piece import Piece, Weights

_ROPE = RopeRules(
    kinds=("default", "longrope"),
    partial=True,
    aliases=(("su", "longrope"), ("yarn", "longrope")),
    original=4096,
)


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Phi3ForCausalLM",
        norm_eps=1e-5,
        rope=_ROPE,
    )
    return dataclasses.replace(
        config, sliding_windows=uniform_window(fields, config.num_layers, None)
    )


def _weights(config: ModelConfig) -> Weights:
    """Queries of all heads, then keys, then values, in one tensor; gate and up in another."""
    sizes = config.axis_sizes
    queries, keys = sizes["N"] * sizes["H"], sizes["K"] * sizes["H"]
    rows = queries + 2 * keys
    weights = llama_weights(config)
    for i in range(config.num_layers):
        qkv = f"model.layers.{i}.self_attn.qkv_proj.weight"
        gate_up = f"model.layers.{i}.mlp.gate_up_proj.weight"
        weights[f"layers.{i}.attention.qkv.weight"] = (
            Piece(qkv, "(K A H) D", a=sizes["G"], rows=rows),
            Piece(qkv, "(K A H) D", first_row=queries, rows=rows),
            Piece(qkv, "(K A H) D", first_row=queries + keys, rows=rows),
        )
        weights[f"layers.{i}.mlp.up.weight"] = (Piece(gate_up, "(A F) D", a=2),)
    return weights


def _same_layers(kinds: Any, fields: ConfigFields) -> bool:
    kind = "sliding_attention" if fields.has("sliding_window") else "full_attention"
    return isinstance(kinds, list) and all(one == kind for one in kinds)


PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini",
    field_table(
        ["phi3"],
        reads=LLAMA_FIELDS | {"partial_rotary_factor", "sliding_window"},
        constraints={
            "layer_types": Constraint(
                _same_layers,
                "sliding_attention for each layer with a sliding_window, full_attention without: "
                "this architecture has one kind of layers",
            )
        },
        ignores=["embd_pdrop", "initializer_range", "resid_pdrop"],
    ),
    _read,
    _weights,
)
