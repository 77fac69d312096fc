"""BLOOM: attention with linear biases, LayerNorms, a norm of the embeddings, no gated MLP."""

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import MAX_LAYERS, ConfigFields
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table, one_of
from rjax.models.families.llama import read_dtype, whole_head_dim
from rjax.models.families.opt import UNUSED_ROTARY_FIELDS, norm_weights
from rjax.models.loading.pieces import Piece, Weights


def _read(fields: ConfigFields) -> ModelConfig:
    D = fields.integer("n_embed", None) or fields.integer("hidden_size", 64)
    layers = fields.integer("num_hidden_layers", None, maximum=MAX_LAYERS)
    layers = layers or fields.integer("n_layer", 2, maximum=MAX_LAYERS)
    heads = fields.integer("num_attention_heads", None) or fields.integer("n_head", 8)
    return ModelConfig(
        architecture="BloomForCausalLM",
        vocab_size=fields.integer("vocab_size"),
        hidden_size=D,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=whole_head_dim(D, heads),
        intermediate_size=4 * D,
        max_position_embeddings=fields.integer("seq_length", 2048),
        rope=None,
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        sliding_windows=(None,) * layers,
        activation="gelu_tanh",
        dtype=read_dtype(fields),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_norm=True,
        gated_mlp=False,
        alibi=True,
        norms=NormConfig(on_embedding=True),
    )


def _weights(config: ModelConfig) -> Weights:
    root = "transformer."
    weights: Weights = {
        "embedding.weight": (Piece(root + "word_embeddings.weight", "V D"),),
        **norm_weights("embedding_norm", root + "word_embeddings_layernorm"),
        **norm_weights("norm", root + "ln_f"),
    }
    if not config.tie_embeddings:
        weights["head.weight"] = (Piece("lm_head.weight", "V D"),)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.", f"{root}h.{i}."
        weights |= norm_weights(ours + "attention_norm", theirs + "input_layernorm")
        weights |= norm_weights(ours + "mlp_norm", theirs + "post_attention_layernorm")
        for linear, name, weight, bias, a in (
            ("attention.qkv", "self_attention.query_key_value", "(K A H) D", "(K A H)", 3),
            ("attention.output", "self_attention.dense", "D (N H)", "D", 1),
            ("mlp.up", "mlp.dense_h_to_4h", "(A F) D", "(A F)", 1),
            ("mlp.down", "mlp.dense_4h_to_h", "D F", "D", 1),
        ):
            weights[f"{ours}{linear}.weight"] = (Piece(f"{theirs}{name}.weight", weight, a=a),)
            weights[f"{ours}{linear}.bias"] = (Piece(f"{theirs}{name}.bias", bias, a=a),)
    return weights


BLOOM = Family(
    "BloomForCausalLM",
    "BLOOM and BLOOMZ",
    field_table(
        ["bloom"],
        reads=[
            "hidden_size",
            "layer_norm_epsilon",
            "n_embed",
            "n_head",
            "n_layer",
            "num_attention_heads",
            "num_hidden_layers",
            "seq_length",
            "tie_word_embeddings",
            "vocab_size",
        ],
        constraints={
            **NO_WINDOWS,
            "apply_residual_connection_post_layernorm": one_of(
                False, why="the residual stream is not normed"
            ),
        },
        ignores=[
            "classifier_dropout",
            "hidden_dropout",
            "initializer_range",
            "max_position_embeddings",
            "pretraining_tp",
            "slow_but_exact",
            *UNUSED_ROTARY_FIELDS,
        ],
    ),
    _read,
    _weights,
)
