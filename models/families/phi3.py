"""Phi-3 and Phi-4: Llama with fused projections in the checkpoint, and perhaps longrope."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import UNIFORM_LAYERS, field_table
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    fuse_gate_up,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules
from rjax.models.families.windows import uniform_window
from rjax.models.loading.pieces import Piece, Weights

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
    copies = config.kv_head_copies
    queries, keys = sizes["N"] * sizes["H"], sizes["K"] // copies * sizes["H"]
    rows = queries + 2 * keys
    weights = fuse_gate_up(llama_weights(config), config)
    for i in range(config.num_layers):
        qkv = f"model.layers.{i}.self_attn.qkv_proj.weight"
        weights[f"layers.{i}.attention.qkv.weight"] = (
            Piece(qkv, "(K A H) D", a=sizes["G"], rows=rows),
            Piece(qkv, "(K A H) D", first_row=queries, rows=rows, copies=copies),
            Piece(qkv, "(K A H) D", first_row=queries + keys, rows=rows, copies=copies),
        )
    return weights


PHI3 = Family(
    "Phi3ForCausalLM",
    "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini",
    field_table(
        ["phi3"],
        reads=LLAMA_FIELDS | {"partial_rotary_factor", "sliding_window"},
        constraints=UNIFORM_LAYERS,
        ignores=["embd_pdrop", "initializer_range", "resid_pdrop"],
    ),
    _read,
    _weights,
)
