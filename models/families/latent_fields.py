"""Multi-head latent attention in config.json and in checkpoints, as DeepSeek has it."""

import dataclasses

from rjax.models.config import ModelConfig, ScaleConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.field_table import NO_WINDOWS, Constraint, one_of
from rjax.models.families.llama import (
    LLAMA_FIELDS,
    WHOLE_ROTATION,
    llama_weights,
    read_llama_config,
)
from rjax.models.families.rope_fields import RopeRules, read_rope, rope_object, yarn_scale
from rjax.models.latent_config import LatentConfig
from rjax.models.loading.pieces import Piece, Weights

LATENT_FIELDS = (LLAMA_FIELDS - {"head_dim", "num_key_value_heads"}) | {
    "attention_bias",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
}
"""Fields that `read_latent_config` reads."""
LATENT_CONSTRAINTS = {
    **NO_WINDOWS,
    **WHOLE_ROTATION,
    "moe_layer_freq": one_of(1, why="every layer behind the dense ones has experts"),
    "num_key_value_heads": Constraint(
        lambda value, fields: value == fields.raw("num_attention_heads"),
        "num_attention_heads: each query head has a key and a value of its own",
    ),
}
"""Constraints of families with latent attention."""


def rotated_dims(default: int) -> Constraint:
    """Constraint of head_dim, which transformers takes for the rotated dims of a head."""
    return Constraint(
        lambda value, fields: value == (fields.raw("qk_rope_head_dim") or default),
        "qk_rope_head_dim: transformers rotates that many dims",
    )


def read_latent_config(
    fields: ConfigFields,
    architecture: str,
    defaults: LatentConfig,
    *,
    norm_eps: float = 1e-6,
    interleaved: bool = True,
) -> ModelConfig:
    """The ModelConfig of a family with latent attention.

    Args:
        fields: the fields of config.json.
        architecture: the family's class name in config.json.
        defaults, norm_eps: the family's defaults in transformers.
        interleaved: the rotated pairs are neighbours.
    """
    no_q_rank = fields.given("q_lora_rank") and not fields.has("q_lora_rank")
    bias = fields.flag("attention_bias", False)
    latent = LatentConfig(
        q_rank=None if no_q_rank else fields.integer("q_lora_rank", defaults.q_rank),
        kv_rank=fields.integer("kv_lora_rank", defaults.kv_rank),
        nope_dim=fields.integer("qk_nope_head_dim", defaults.nope_dim),
        rope_dim=fields.integer("qk_rope_head_dim", defaults.rope_dim),
        value_dim=fields.integer("v_head_dim", defaults.value_dim),
        bias=bias,
    )
    config = read_llama_config(
        fields,
        architecture,
        head_dim=latent.head_dim,
        has_head_dim=False,
        has_kv_heads=False,
        norm_eps=norm_eps,
        rope=None,
    )
    rules = RopeRules(interleaved=interleaved)
    rope = read_rope(fields, latent.rope_dim, config.max_position_embeddings, rules)
    scale = latent.qk_dim**-0.5
    settings = fields.inner(rope_object(fields))
    if rope.kind != "default" and settings.raw("mscale_all_dim"):
        scale *= yarn_scale(rope.factor, settings.number("mscale_all_dim")) ** 2
    return dataclasses.replace(
        config,
        latent=latent,
        rope=rope,
        output_bias=bias,
        scales=ScaleConfig(attention=scale),
    )


def latent_weights(config: ModelConfig) -> Weights:
    """The checkpoint pieces of every parameter but experts, with DeepSeek's tensor names."""
    latent = config.latent
    assert latent is not None
    weights = {
        path: pieces for path, pieces in llama_weights(config).items() if ".attention." not in path
    }
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.attention.", f"model.layers.{i}.self_attn."
        low_rank = latent.q_rank is not None
        q, axes = ("q_b_proj", "(N W) Q") if low_rank else ("q_proj", "(N W) D")
        pieces = {
            "q.weight": Piece(f"{theirs}{q}.weight", axes),
            "kv_a.weight": Piece(f"{theirs}kv_a_proj_with_mqa.weight", "Y D"),
            "kv_norm.weight": Piece(f"{theirs}kv_a_layernorm.weight", "Z"),
            "kv_b.weight": Piece(f"{theirs}kv_b_proj.weight", "(N E) Z"),
            "output.weight": Piece(f"{theirs}o_proj.weight", "D (N O)"),
        }
        if low_rank:
            pieces["q_a.weight"] = Piece(f"{theirs}q_a_proj.weight", "Q D")
            pieces["q_norm.weight"] = Piece(f"{theirs}q_a_layernorm.weight", "Q")
        if latent.bias:
            pieces["kv_a.bias"] = Piece(f"{theirs}kv_a_proj_with_mqa.bias", "Y")
            pieces["output.bias"] = Piece(f"{theirs}o_proj.bias", "D")
            if low_rank:
                pieces["q_a.bias"] = Piece(f"{theirs}q_a_proj.bias", "Q")
        weights |= {ours + name: (piece,) for name, piece in pieces.items()}
    return weights
