"""Gemma 4 (text): full layers with larger heads, values that are the keys, experts beside an MLP.

Sliding and full layers differ in head dim and KV heads. In full layers of the larger models the
values are the keys before norm and rotary embedding; the small models have inputs for each layer
and last layers that attend over the KV of earlier ones.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from rjax.models.config import ModelConfig, NormConfig, ScaleConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.experts_config import ExpertsConfig
from rjax.models.families.expert_weights import (
    expert_layers,
    weights_of_all,
    weights_of_each,
)
from rjax.models.families.family import Family
from rjax.models.families.field_table import Constraint, absent, field_table
from rjax.models.families.gemma import GEMMA_NORMS
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import ROPE_FIELDS, RopeRules, parse_rope
from rjax.models.families.windows import patterned_windows
from rjax.models.layer_config import LayerConfig, PerLayerInputs
from rjax.models.loading.pieces import Piece, Weights
from rjax.models.rope import RopeConfig
from rjax.pallas_kernels.experts.base import Router

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ROPES: Mapping[str, Mapping[str, Any]] = {
    _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_OF_LAYER = frozenset({"head_dim", "num_key_value_heads"})
_FIELDS = (LLAMA_FIELDS - ROPE_FIELDS - {"hidden_act"}) | {
    *("attention_bias", "attention_k_eq_v", "final_logit_softcapping", "global_head_dim"),
    *("hidden_activation", "layer_types", "num_global_key_value_heads", "num_kv_shared_layers"),
    *("per_layer_config", "rope_parameters", "sliding_window", "use_double_wide_mlp"),
}
_EXPERT_FIELDS = {"enable_moe_block", "moe_intermediate_size", "num_experts", "top_k_experts"}
_INPUT_FIELDS = {"hidden_size_per_layer_input", "vocab_size_per_layer_input"}
_BESIDE_EXPERTS = {
    "router": "router.scale",
    "before": "pre_feedforward_layernorm_2.weight",
    "behind": "post_feedforward_layernorm_2.weight",
    "behind_shared": "post_feedforward_layernorm_1.weight",
}
_OF_KV = ("k_proj", "v_proj", "k_norm", "v_norm")


def _read(fields: ConfigFields, architecture: str, *, window: int, unified: bool) -> ModelConfig:
    config = read_llama_config(
        fields,
        architecture,
        head_dim=256,
        num_kv_heads=4,
        tie_embeddings=True,
        activation="gelu_pytorch_tanh",
        names={"hidden_act": "hidden_activation"},
        rope=None,
    )
    bias = fields.flag("attention_bias", False)
    kinds, windows = _windows(fields, config.num_layers, window)
    layers, sources = _layers(fields, config, kinds)
    max_position = config.max_position_embeddings
    heads = {kind: layer.head_dim for kind, layer in zip(kinds, layers, strict=True)}
    ropes = {kind: _rope(fields, kind, H, max_position) for kind, H in heads.items()}
    config = dataclasses.replace(
        config,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_windows=windows,
        norms=NormConfig("sandwich", on_values=True),
        scales=ScaleConfig(
            attention=1.0,
            embedding=math.sqrt(config.hidden_size),
            learned=True,
            logit_soft_cap=fields.number("final_logit_softcapping", None),
        ),
        rope=ropes[_FULL],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        layers=layers,
        kv_sources=sources,
    )
    if unified:
        return config
    return dataclasses.replace(
        config, experts=_experts(fields, config), per_layer_inputs=_inputs(fields)
    )


def _windows(
    fields: ConfigFields, num_layers: int, window: int
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """(the type of each layer, its window); the last layer has full attention in any case."""
    kinds, windows = patterned_windows(fields, num_layers, window=window, pattern=6)
    return (*kinds[:-1], _FULL), (*windows[:-1], None)


def _layers(
    fields: ConfigFields, config: ModelConfig, kinds: tuple[str, ...]
) -> tuple[tuple[LayerConfig, ...], tuple[int, ...]]:
    """(sizes of each layer, the layer whose KV it attends over)."""
    heads = _heads(fields, config, kinds)
    same = fields.flag("attention_k_eq_v", False)
    shared = fields.integer("num_kv_shared_layers", 0, minimum=0)
    wide = 2 if fields.flag("use_double_wide_mlp", False) else 1
    own = kinds[: config.num_layers - shared]
    if shared and (shared >= config.num_layers or set(own) != set(kinds)):
        raise CheckpointError(
            f"config.json: num_kv_shared_layers is {shared}; a layer of each type of layer_types "
            "must have keys and values of its own"
        )
    layers, sources = [], []
    for layer, kind in enumerate(kinds):
        K, H = heads[kind]
        reuses = layer >= len(own)
        sources.append(len(own) - 1 - own[::-1].index(kind) if reuses else layer)
        layers.append(
            LayerConfig(
                num_kv_heads=K,
                head_dim=H,
                intermediate_size=config.intermediate_size * (wide if reuses else 1),
                kv_projections=0 if reuses else 1 if same and kind == _FULL else 2,
            )
        )
    return tuple(layers), tuple(sources) if shared else ()


def _heads(
    fields: ConfigFields, config: ModelConfig, kinds: tuple[str, ...]
) -> dict[str, tuple[int, int]]:
    """(KV heads, head dim) of each type of layer.

    ``per_layer_config`` of transformers 5 has those of single layers; published files have fields
    for the full ones.
    """
    plain = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    found = {kind: dict(plain) for kind in dict.fromkeys(kinds)}
    if fields.given("per_layer_config"):  # null means no other heads
        by_layer = {int(key): dict(of_layer) for key, of_layer in _of_layers(fields)}
        for kind in found:
            of_kind = [by_layer.get(i, {}) for i, other in enumerate(kinds) if other == kind]
            if by_layer.keys() - set(range(len(kinds))) or any(o != of_kind[0] for o in of_kind):
                fields.refuse("per_layer_config", "the same for all layers of a type")
            found[kind] |= of_kind[0]
    else:
        found[_FULL]["head_dim"] = fields.integer("global_head_dim", 512)
        if fields.flag("attention_k_eq_v", False):
            K = fields.integer("num_global_key_value_heads", None)
            found[_FULL]["num_key_value_heads"] = K or config.num_kv_heads
    for kind, sizes in found.items():
        if config.num_heads % sizes["num_key_value_heads"] or sizes["head_dim"] % 2:
            raise CheckpointError(
                f"config.json: layers of the type {kind} have {sizes['num_key_value_heads']} KV "
                f"heads of {sizes['head_dim']} numbers; they must divide the {config.num_heads} "
                "query heads, and the numbers must be even"
            )
    return {
        kind: (sizes["num_key_value_heads"], sizes["head_dim"]) for kind, sizes in found.items()
    }


def _of_layers(fields: ConfigFields) -> list[tuple[str, dict[str, int]]]:
    """The entries of ``per_layer_config``."""
    value = fields.raw("per_layer_config") or {}
    usable = isinstance(value, dict) and all(
        re.fullmatch("[0-9]{1,5}", str(layer))
        and isinstance(own, dict)
        and own.keys() <= _OF_LAYER
        and all(type(size) is int and size > 0 for size in own.values())
        for layer, own in value.items()
    )
    if not usable:
        fields.refuse(
            "per_layer_config", f"positive {' and '.join(sorted(_OF_LAYER))} of numbered layers"
        )
    return [(str(layer), own) for layer, own in value.items()]


def _rope(fields: ConfigFields, kind: str, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary embedding of a type of layer."""
    name = "rope_parameters"
    by_type = fields.inner(name)
    values = by_type.inner(kind).values() if fields.has(name) else _ROPES[kind]
    if by_type.names() - _ROPES.keys() or not values:
        fields.refuse(name, f"objects for {' and '.join(_ROPES)}")
    kinds = ("default", "linear", "proportional")
    rules = RopeRules(kinds=kinds, partial=values.get("rope_type") == "proportional")
    rope = ConfigFields(values, f"config.json: {name}")
    return parse_rope(rope, f"{name}.{kind}", head_dim, max_position, rules, None)


def _experts(fields: ConfigFields, config: ModelConfig) -> ExpertsConfig | None:
    """The experts beside the feed-forward block, which is their shared one."""
    if not fields.flag("enable_moe_block", False):
        return None
    experts = fields.integer("num_experts")
    if any(layer.intermediate_size != config.intermediate_size for layer in config.layers):
        fields.refuse("use_double_wide_mlp", "false with experts")
    return ExpertsConfig(
        num_experts=experts,
        top_k=fields.integer("top_k_experts", maximum=experts),
        width=fields.integer("moe_intermediate_size"),
        layers=(True,) * config.num_layers,
        router=Router(renormalise=True),
        shared_width=config.intermediate_size,
        normed=True,
    )


def _inputs(fields: ConfigFields) -> PerLayerInputs | None:
    """The inputs of each layer of its own; a width of 0 means none."""
    width = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not width:
        return None
    return PerLayerInputs(width, fields.integer("vocab_size_per_layer_input", 262_144))


def _read_gemma4(fields: ConfigFields) -> ModelConfig:
    return _read(fields, "Gemma4ForCausalLM", window=512, unified=False)


def _read_unified(fields: ConfigFields) -> ModelConfig:
    return _read(fields, "Gemma4UnifiedForCausalLM", window=1024, unified=True)


def _weights(config: ModelConfig) -> Weights:
    return _all_weights(config, fused=False)


def _fused_weights(config: ModelConfig) -> Weights:
    return _all_weights(config, fused=True)


def _all_weights(config: ModelConfig, *, fused: bool) -> Weights:
    """The pieces of every parameter; fused if one tensor has all experts of a layer, as in
    unquantised files."""
    weights = llama_weights(config, GEMMA_NORMS)
    weights |= {
        f"layers.{i}.factor": (Piece(f"model.layers.{i}.layer_scalar", "A"),)
        for i in range(config.num_layers)
    }
    if config.per_layer_inputs is not None:
        weights |= _input_weights(config)
    if config.experts is not None:
        weights |= _expert_weights(config, fused=fused)
    return {path: _of_layer(path, pieces) for path, pieces in weights.items()}


def _input_weights(config: ModelConfig) -> Weights:
    weights: Weights = {
        "per_layer.weight": (Piece("model.embed_tokens_per_layer.weight", "v (L p)"),),
        "per_layer.projection.weight": (
            Piece("model.per_layer_model_projection.weight", "(L p) D"),
        ),
        "per_layer.norm.weight": (Piece("model.per_layer_projection_norm.weight", "p"),),
    }
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}.per_layer", f"model.layers.{i}"
        weights |= {
            f"{ours}.gate.weight": (Piece(f"{theirs}.per_layer_input_gate.weight", "p D"),),
            f"{ours}.output.weight": (Piece(f"{theirs}.per_layer_projection.weight", "D p"),),
            f"{ours}.norm.weight": (Piece(f"{theirs}.post_per_layer_input_norm.weight", "D"),),
        }
    return weights


def _expert_weights(config: ModelConfig, *, fused: bool) -> Weights:
    weights: Weights = {}
    for i in expert_layers(config):
        ours, theirs = f"layers.{i}.mlp", f"model.layers.{i}"
        weights |= weights_of_all(i, theirs) if fused else weights_of_each(config, i, theirs)
        weights |= {
            f"{ours}.router": (Piece(f"{theirs}.router.proj.weight", "J D"),),
            f"{ours}.norms.factors": (Piece(f"{theirs}.router.per_expert_scale", "J"),),
            f"{ours}.shared.up.weight": (
                Piece(f"{theirs}.mlp.gate_proj.weight", "(A U) D"),
                Piece(f"{theirs}.mlp.up_proj.weight", "(A U) D"),
            ),
            f"{ours}.shared.down.weight": (Piece(f"{theirs}.mlp.down_proj.weight", "D U"),),
        }
        for name, tensor in _BESIDE_EXPERTS.items():
            weights[f"{ours}.norms.{name}.weight"] = (Piece(f"{theirs}.{tensor}", "D"),)
    return weights


def _of_layer(path: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces, with the layer whose sizes their axes have."""
    if not path.startswith("layers."):
        return pieces
    layer = int(path.split(".")[1])
    return tuple(dataclasses.replace(piece, layer=layer) for piece in pieces)


def _unused(config: ModelConfig) -> tuple[str, ...]:
    """Keys and values of layers that attend over those of others, which some files have."""
    return tuple(
        f"model.layers.{i}.self_attn.{name}."
        for i in range(config.num_layers)
        if config.kv_source(i) != i
        for name in _OF_KV
    )


# Those outside of rope_parameters have no effect in this architecture.
_IGNORED = {"initializer_range", "partial_rotary_factor", "rope_theta"}
_CONSTRAINTS = {
    "use_bidirectional_attention": Constraint(
        lambda value, _: value is False or value == "vision",
        "null, false or vision: a token of text sees no later token",
    ),
    "rope_scaling": absent("the rotary embedding of each type of layer is in rope_parameters"),
}
GEMMA4 = Family(
    "Gemma4ForCausalLM",
    "Gemma 4 (text): 26B-A4B, 31B, E2B, E4B",
    field_table(
        ["gemma4_text"],
        reads=_FIELDS | _EXPERT_FIELDS | _INPUT_FIELDS,
        constraints=_CONSTRAINTS,
        ignores={*_IGNORED, "standardize", "use_clipped_linears"},
    ),
    _read_gemma4,
    _weights,
    fused_weights=_fused_weights,
    unused=_unused,
)
GEMMA4_UNIFIED = Family(
    "Gemma4UnifiedForCausalLM",
    "Gemma 4 (text): 12B",
    field_table(
        ["gemma4_unified_text"],
        reads=_FIELDS,
        constraints=_CONSTRAINTS,
        ignores={*_IGNORED, "vision_config"},
    ),
    _read_unified,
    _weights,
    unused=_unused,
)
