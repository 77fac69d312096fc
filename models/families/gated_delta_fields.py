"""Hybrids of gated delta net layers and attention, in config.json and in checkpoints (Qwen)."""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.families.field_table import one_of
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import RopeRules
from rjax.models.linear_config import LinearAttentionConfig
from rjax.models.loading.pieces import Piece, Weights

HYBRID_FIELDS = (LLAMA_FIELDS - {"hidden_act"}) | {
    "attention_bias",
    "full_attention_interval",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "partial_rotary_factor",
}
"""Fields that `read_hybrid_config` reads."""
HYBRID_CONSTRAINTS = {
    "attn_output_gate": one_of(True, why="transformers has no attention without a gate"),
    "hidden_act": one_of("silu", "swish", why="the convolution is followed by silu"),
}
"""Constraints of these families."""
HYBRID_IGNORED = frozenset(
    {
        "initializer_range",
        "mamba_ssm_dtype",  # the states are float32
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
)
"""Fields of these families that do not change the logits."""
_LINEAR, _FULL = "linear_attention", "full_attention"


def read_hybrid_config(
    fields: ConfigFields,
    architecture: str,
    *,
    num_kv_heads: int,
    intermediate_size: int | None = None,
) -> ModelConfig:
    """The ModelConfig of a family with gated delta nets, but for its experts.

    Args:
        fields: the fields of config.json.
        architecture: the family's class name in config.json.
        num_kv_heads: the family's default in transformers.
        intermediate_size: F, where config.json has none.

    Raises:
        CheckpointError: a field has a value that is not allowed.
    """
    config = read_llama_config(
        fields,
        architecture,
        head_dim=256,
        num_kv_heads=num_kv_heads,
        activation=None,
        intermediate_size=intermediate_size,
        rope=RopeRules(partial=True, part=0.25),
    )
    key_heads: int = fields.integer("linear_num_key_heads", 16)
    value_heads: int = fields.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads is {value_heads} and linear_num_key_heads "
            f"{key_heads}; the first must be a multiple of the second"
        )
    linear = LinearAttentionConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
        layers=_linear_layers(fields, config.num_layers),
    )
    bias = fields.flag("attention_bias", False)
    return dataclasses.replace(
        config,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        output_gate=True,
        norms=NormConfig(unit_offset=True),
        linear=linear if any(linear.layers) else None,
    )


def _linear_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is linear: ``layer_types``, or all but each interval's last."""
    kinds = fields.texts("layer_types")
    if kinds is None:
        interval: int = fields.integer("full_attention_interval", 4)
        kinds = tuple(_LINEAR if (i + 1) % interval else _FULL for i in range(num_layers))
    if len(kinds) != num_layers or not set(kinds) <= {_LINEAR, _FULL}:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds)} entries of the kinds "
            f"{', '.join(sorted(set(kinds)))}; expected {_LINEAR} or {_FULL} for each of the "
            f"{num_layers} layers"
        )
    if _FULL not in kinds:
        raise CheckpointError(
            f"config.json: all {num_layers} layers are {_LINEAR}; at least one must be {_FULL} "
            "(see layer_types and full_attention_interval)"
        )
    return tuple(kind == _LINEAR for kind in kinds)


def hybrid_weights(config: ModelConfig, *, fused: bool) -> Weights:
    """The checkpoint pieces of every parameter but experts.

    fused: the rows of each key head are together in one tensor (Qwen3-Next); otherwise queries,
    keys and values have one tensor, in which all queries are first, and the gates others.
    """
    weights = llama_weights(config)
    for i in range(config.num_layers):
        if config.is_linear(i):
            ours, theirs = f"layers.{i}.attention.", f"model.layers.{i}.linear_attn."
            weights |= {
                ours + name: pieces for name, pieces in _pieces(config, theirs, fused).items()
            }
    return weights


def _pieces(config: ModelConfig, theirs: str, fused: bool) -> Weights:
    """The pieces of one gated delta net; ``theirs`` is the start of the names of its tensors."""
    linear = config.linear
    assert linear is not None
    unit = linear.unit
    if fused:
        a = (linear.mixed_dim + linear.values_dim) // unit
        qkvz = (Piece(theirs + "in_proj_qkvz.weight", "(R A M) D", a=a),)
        ba = (Piece(theirs + "in_proj_ba.weight", "(R A B) D", a=2),)
    else:
        z = Piece(theirs + "in_proj_z.weight", "(R A M) D", a=linear.values_dim // unit)
        qkv = _mixed(linear, Piece(theirs + "in_proj_qkv.weight", "(R A M) D"), unit)
        qkvz = *qkv, z
        ba = tuple(Piece(f"{theirs}in_proj_{name}.weight", "(R A B) D") for name in "ba")
    return {
        "qkvz.weight": qkvz,
        "ba.weight": ba,
        "conv": _mixed(linear, Piece(theirs + "conv1d.weight", "(R A) O X"), 1),
        "decay_rate": (Piece(theirs + "A_log", "(R B)"),),
        "decay_bias": (Piece(theirs + "dt_bias", "(R B)"),),
        "norm.weight": (Piece(theirs + "norm.weight", "Y"),),
        "output.weight": (Piece(theirs + "out_proj.weight", "D (R E)"),),
    }


def _mixed(linear: LinearAttentionConfig, piece: Piece, unit: int) -> tuple[Piece, ...]:
    """The queries, keys and values in a tensor that has all queries first, then all keys.

    unit: rows of an entry of axis A.
    """
    pieces, first = [], 0
    for size in (linear.key_dim, linear.key_dim, linear.values_dim):
        pieces.append(
            dataclasses.replace(
                piece,
                a=size // unit,
                first_row=first,
                rows=linear.key_heads * linear.mixed_dim,
            )
        )
        first += linear.key_heads * size
    return tuple(pieces)


def no_further_tokens(_: ModelConfig) -> tuple[str, ...]:
    """The start of the tensors that predict further tokens; they are not used."""
    return ("mtp.",)
