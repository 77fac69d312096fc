"""Llama 2, 3 and 3.x; Llama-like families build on its mapping."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rjax.models.config import ModelConfig
from rjax.models.config_fields import MAX_LAYERS, ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, Constraint, field_table
from rjax.models.families.rope_fields import ROPE_FIELDS, RopeRules, read_rope
from rjax.models.loading.pieces import Piece, Weights

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
LLAMA_FIELDS = frozenset(
    {
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "tie_word_embeddings",
        "vocab_size",
        *ROPE_FIELDS,
    }
)
"""Fields that `read_llama_config` reads."""
WHOLE_ROTATION = {
    "partial_rotary_factor": Constraint(
        lambda value, _: type(value) in (int, float) and value == 1,
        "1: this architecture rotates every dim",
    )
}
"""Constraint of families whose rotary embedding covers all dims."""
DEFAULT_ROPE = RopeRules()
"""Rules of families that rotate every dim, with Llama's defaults."""
DTYPES = {name: name for name in ("float32", "float16", "bfloat16")}


def read_llama_config(
    fields: ConfigFields,
    architecture: str,
    *,
    head_dim: int | None = None,
    has_head_dim: bool = True,
    has_kv_heads: bool = True,
    num_kv_heads: int | None = None,
    norm_eps: float = 1e-6,
    tie_embeddings: bool = False,
    activation: str | None = "silu",
    intermediate_size: int | None = None,
    names: Mapping[str, str] | None = None,
    rope: RopeRules | None = DEFAULT_ROPE,
) -> ModelConfig:
    """The ModelConfig of a config.json with Llama's field names; families replace what differs.

    Args:
        fields: the fields of config.json.
        architecture: the family's class name in config.json.
        head_dim, num_kv_heads, norm_eps, tie_embeddings, activation: the family's
             defaults in transformers. Without an activation, silu is the only one.
        has_head_dim: false where config.json has no head_dim: it is ``head_dim``, or
             hidden_size / num_attention_heads.
        intermediate_size: F, where config.json has none.
        has_kv_heads: false where each query head has a KV head of its own.
        names: the family's name of a field where it differs from Llama's.
        rope: what the rotary embedding may be; None for a family that reads it itself.
    """
    names = names or {}
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    K: int = num_heads
    if has_kv_heads:
        if fields.given("num_key_value_heads") or num_kv_heads is None:
            num_kv_heads = num_heads  # the meaning of null
        K = fields.integer("num_key_value_heads", num_kv_heads)
    if num_heads % K:
        raise CheckpointError(
            f"config.json: num_attention_heads is {num_heads} and num_key_value_heads {K}; "
            "the first must be a multiple of the second"
        )
    if head_dim is None and not (has_head_dim and fields.has("head_dim")):
        head_dim = whole_head_dim(hidden_size, num_heads)
    H: int = fields.integer("head_dim", head_dim) if has_head_dim else head_dim
    max_position = fields.integer("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=K,
        head_dim=H,
        intermediate_size=fields.integer("intermediate_size")
        if intermediate_size is None
        else intermediate_size,
        max_position_embeddings=max_position,
        rope=None if rope is None else read_rope(fields, H, max_position, rope),
        norm_eps=fields.number(names.get("rms_norm_eps", "rms_norm_eps"), norm_eps),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_embeddings),
        sliding_windows=(None,) * num_layers,
        activation="silu"
        if activation is None
        else fields.choice(names.get("hidden_act", "hidden_act"), ACTIVATION_NAMES, activation),
        dtype=read_dtype(fields),
    )


def whole_head_dim(hidden_size: int, num_heads: int) -> int:
    """hidden_size / num_heads, which must be an integer."""
    if hidden_size % num_heads:
        raise CheckpointError(
            f"config.json: hidden_size is {hidden_size} and num_attention_heads {num_heads}; "
            "without a head_dim, the first must be a multiple of the second"
        )
    return hidden_size // num_heads


def read_dtype(fields: ConfigFields) -> str:
    """``dtype``, or ``torch_dtype`` in older checkpoints; float32 if both are missing."""
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    return fields.choice(name, DTYPES, "float32")


PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""The checkpoint's names of a layer's norms."""


def llama_weights(config: ModelConfig, norms: Mapping[str, str] | None = None) -> Weights:
    """The checkpoint pieces of all parameters but those of experts and of linear attention.

    The tensors have Llama's names; ``norms`` has those of a layer's norms where they are others.
    """
    norms = PRE_NORMS if norms is None else norms
    offset = 1.0 if config.norms.unit_offset else 0.0
    weights: Weights = {
        "embedding.weight": (Piece("model.embed_tokens.weight", "V D"),),
        "norm.weight": (Piece("model.norm.weight", "D", offset=offset),),
    }
    if not config.tie_embeddings:
        weights["head.weight"] = (Piece("lm_head.weight", "V D"),)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        mlp = theirs + "mlp."
        if not config.is_linear(i):
            of_layer = config.of_layer(i)
            weights |= _attention_weights(of_layer, ours + "attention.", theirs + "self_attn.")
        if not config.has_experts(i):
            weights |= {
                ours + "mlp.up.weight": (
                    Piece(mlp + "gate_proj.weight", "(A F) D"),
                    Piece(mlp + "up_proj.weight", "(A F) D"),
                ),
                ours + "mlp.down.weight": (Piece(mlp + "down_proj.weight", "D F"),),
            }
        for norm, name in norms.items():
            weights[f"{ours}{norm}.weight"] = (Piece(f"{theirs}{name}.weight", "D", offset=offset),)
        if config.mlp_bias:
            weights[ours + "mlp.up.bias"] = (
                Piece(mlp + "gate_proj.bias", "(A F)"),
                Piece(mlp + "up_proj.bias", "(A F)"),
            )
            weights[ours + "mlp.down.bias"] = (Piece(mlp + "down_proj.bias", "D"),)
    return weights


def _attention_weights(config: ModelConfig, ours: str, theirs: str) -> Weights:
    """The pieces of a layer's attention.

    ours, theirs: start of the names of its parameters, and of its tensors.
    """
    G, copies = config.axis_sizes["G"], config.kv_head_copies
    queries = 2 * G if config.output_gate else G  # the gate of a head follows its query
    of_kv = ("k_proj", "v_proj")[: config.kv_projections]
    weights: Weights = {
        ours + "qkv.weight": (
            Piece(theirs + "q_proj.weight", "(K A H) D", a=queries),
            *(Piece(f"{theirs}{name}.weight", "(K A H) D", copies=copies) for name in of_kv),
        ),
        ours + "output.weight": (Piece(theirs + "o_proj.weight", "D (N H)"),),
    }
    if config.qkv_bias:
        weights[ours + "qkv.bias"] = (
            Piece(theirs + "q_proj.bias", "(K A H)", a=queries),
            *(Piece(f"{theirs}{name}.bias", "(K A H)", copies=copies) for name in of_kv),
        )
    if config.output_bias:
        weights[ours + "output.bias"] = (Piece(theirs + "o_proj.bias", "D"),)
    if config.qk_norm:
        axes = "(K A H)" if config.norms.whole_qk else "H"
        offset = 1.0 if config.norms.unit_offset else 0.0
        of_q = Piece(theirs + "q_norm.weight", axes, a=G, offset=offset)
        of_k = Piece(theirs + "k_norm.weight", axes, offset=offset, copies=copies)
        weights[ours + "q_norm.weight"] = (of_q,)
        if config.kv_projections:
            weights[ours + "k_norm.weight"] = (of_k,)
    return weights


def fuse_gate_up(weights: Weights, config: ModelConfig) -> Weights:
    """The weights of a family whose checkpoints have gate and up in one tensor, gate first."""
    F = config.intermediate_size
    fused = {
        f"layers.{i}.mlp.up.weight": tuple(
            Piece(
                f"model.layers.{i}.mlp.gate_up_proj.weight",
                "(A F) D",
                first_row=first,
                rows=2 * F,
            )
            for first in (0, F)
        )
        for i in range(config.num_layers)
    }
    return weights | fused


def _read(fields: ConfigFields) -> ModelConfig:
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        read_llama_config(fields, "LlamaForCausalLM"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    """config.json of a Llama with default rotary embedding, readable by older transformers too."""
    if config.rope is None or config.rope.kind != "default":
        raise ValueError("only a Llama with default rotary embedding can be saved")
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads // config.kv_head_copies,
        "head_dim": config.head_dim,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "rope_theta": config.rope.theta,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }


LLAMA = Family(
    "LlamaForCausalLM",
    "Llama 2, 3 and 3.x",
    field_table(
        ["llama"],
        reads=LLAMA_FIELDS | {"attention_bias", "mlp_bias"},
        constraints={**NO_WINDOWS, **WHOLE_ROTATION},
        ignores=["initializer_range", "pretraining_tp"],
    ),
    _read,
    llama_weights,
    _write,
)
