"""Phi-3: Llama whose checkpoint is already fused, part of whose dims may rotate."""

import dataclasses

from models.config import ModelConfig
from models.config_fields import ConfigFields
from models.families.family import Family, Piece, Weights
from models.families.llama import llama_weights, read_llama_config
from models.families.windows import uniform_window


def _read(fields: ConfigFields) -> ModelConfig:
    rope = fields.inner("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    for name in ("rope_type", "type"):
        # Phi-3 configs say "su" or "yarn" where they mean longrope.
        rope.require(name, "default", "the long-context scalings of Phi-3 are not supported")
    config = read_llama_config(fields, "Phi3ForCausalLM", norm_eps=1e-5, partial_rotary=True)
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
        weights[f"layers.{i}.attention.qkv"] = (
            Piece(qkv, "(K A H) D", a=sizes["G"], rows=rows),
            Piece(qkv, "(K A H) D", first_row=queries, rows=rows),
            Piece(qkv, "(K A H) D", first_row=queries + keys, rows=rows),
        )
        weights[f"layers.{i}.mlp.up"] = (Piece(gate_up, "(A F) D", a=2),)
    return weights


PHI3 = Family("Phi3ForCausalLM", _read, _weights)
