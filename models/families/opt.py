"""OPT: learned positions, LayerNorm, biases, no gated MLP."""

from rjax.models.config import ModelConfig
from rjax.models.config_fields import MAX_LAYERS, ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, Constraint, field_table, one_of
from rjax.models.families.llama import ACTIVATION_NAMES, read_dtype, whole_head_dim
from rjax.models.loading.pieces import Piece, Weights

_POSITION_OFFSET = 2  # the first rows of the position table are for padding


def _read(fields: ConfigFields) -> ModelConfig:
    hidden_size = fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads")
    bias = fields.flag("enable_bias", True)
    return ModelConfig(
        architecture="OPTForCausalLM",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=whole_head_dim(hidden_size, num_heads),
        intermediate_size=fields.integer("ffn_dim"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=None,
        norm_eps=1e-5,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        sliding_windows=(None,) * num_layers,
        activation=fields.choice("activation_function", ACTIVATION_NAMES, "relu"),
        dtype=read_dtype(fields),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        gated_mlp=False,
        learned_positions=True,
        position_offset=_POSITION_OFFSET,
    )


def norm_weights(ours: str, theirs: str) -> Weights:
    """The pieces of a LayerNorm with bias."""
    return {
        f"{ours}.weight": (Piece(f"{theirs}.weight", "D"),),
        f"{ours}.bias": (Piece(f"{theirs}.bias", "D"),),
    }


def _weights(config: ModelConfig) -> Weights:
    root = "model.decoder."
    weights: Weights = {
        "embedding.weight": (Piece(root + "embed_tokens.weight", "V D"),),
        "positions.weight": (Piece(root + "embed_positions.weight", "C D"),),
        **norm_weights("norm", root + "final_layer_norm"),
    }
    if not config.tie_embeddings:
        weights["head.weight"] = (Piece("lm_head.weight", "V D"),)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"{root}layers.{i}."
        attention = theirs + "self_attn."
        weights |= norm_weights(ours + "attention_norm", theirs + "self_attn_layer_norm")
        weights |= norm_weights(ours + "mlp_norm", theirs + "final_layer_norm")
        weights |= {
            ours + "attention.qkv.weight": tuple(
                Piece(f"{attention}{x}_proj.weight", "(K A H) D") for x in "qkv"
            ),
            ours + "attention.output.weight": (Piece(attention + "out_proj.weight", "D (N H)"),),
            ours + "mlp.up.weight": (Piece(theirs + "fc1.weight", "(A F) D"),),
            ours + "mlp.down.weight": (Piece(theirs + "fc2.weight", "D F"),),
        }
        if config.qkv_bias:
            weights |= {
                ours + "attention.qkv.bias": tuple(
                    Piece(f"{attention}{x}_proj.bias", "(K A H)") for x in "qkv"
                ),
                ours + "attention.output.bias": (Piece(attention + "out_proj.bias", "D"),),
                ours + "mlp.up.bias": (Piece(theirs + "fc1.bias", "(A F)"),),
                ours + "mlp.down.bias": (Piece(theirs + "fc2.bias", "D"),),
            }
    return weights


UNUSED_ROTARY_FIELDS = (
    "head_dim",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
"""Fields without effect in families without rotary embedding."""
_FIELDS = field_table(
    ["opt"],
    reads=[
        "activation_function",
        "enable_bias",
        "ffn_dim",
        "hidden_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "tie_word_embeddings",
        "vocab_size",
    ],
    constraints={
        **NO_WINDOWS,
        "_remove_final_layer_norm": one_of(False, why="the final norm must be there"),
        "do_layer_norm_before": one_of(True, why="norms after the residual are not supported"),
        "layer_norm_elementwise_affine": one_of(True, why="norms must have weights"),
        "word_embed_proj_dim": Constraint(
            lambda value, fields: type(value) is int and value == fields.raw("hidden_size"),
            "equal to hidden_size: projected embeddings are not supported",
        ),
    },
    ignores=["dropout", "init_std", "layerdrop", *UNUSED_ROTARY_FIELDS],
)

OPT = Family("OPTForCausalLM", "OPT", _FIELDS, _read, _weights)
