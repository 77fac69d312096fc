"""GLM-4.7-Flash: DeepSeek's latent attention with the experts of GLM-4.5."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.expert_fields import (
    ROUTED_EXPERT_FIELDS,
    SIGMOID_ROUTER_FIELDS,
    TRAINING_FIELDS,
    read_routed_experts,
    read_sigmoid_router,
)
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family, layers_after_the_last
from rjax.models.families.field_table import Constraint, field_table, one_of
from rjax.models.families.latent_fields import (
    LATENT_CONSTRAINTS,
    LATENT_FIELDS,
    latent_weights,
    read_latent_config,
    rotated_dims,
)
from rjax.models.latent_config import LatentConfig
from rjax.models.loading.pieces import Weights

_NAMES = ExpertNames(shared="shared_experts")
_LATENT = LatentConfig(q_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256)
_KINDS = {"dense": False, "sparse": True}


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_latent_config(
        fields,
        "Glm4MoeLiteForCausalLM",
        _LATENT,
        norm_eps=1e-5,
        interleaved=fields.flag("rope_interleave", True, null=False),
    )
    return dataclasses.replace(
        config,
        experts=read_routed_experts(
            fields,
            _expert_layers(fields, config.num_layers),
            read_sigmoid_router(fields, 1.8),
            experts=64,
            top_k=4,
            width=1536,
            shared=1,
        ),
    )


def _expert_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        kinds = ("dense", *["sparse"] * (num_layers - 1))
    if len(kinds) != num_layers or not set(kinds) <= _KINDS.keys():
        fields.refuse("mlp_layer_types", f"{num_layers} times dense or sparse, one for each layer")
    return tuple(_KINDS[kind] for kind in kinds)


def _weights(config: ModelConfig) -> Weights:
    return latent_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return latent_weights(config) | fused_expert_weights(config, _NAMES)


GLM4_MOE_LITE = Family(
    "Glm4MoeLiteForCausalLM",
    "GLM-4.7-Flash",
    field_table(
        ["glm4_moe_lite"],
        reads=LATENT_FIELDS
        | ROUTED_EXPERT_FIELDS
        | SIGMOID_ROUTER_FIELDS
        | {"mlp_layer_types", "num_local_experts", "rope_interleave"},
        constraints={
            **LATENT_CONSTRAINTS,
            "first_k_dense_replace": Constraint(
                lambda value, fields: value == 1 or fields.raw("mlp_layer_types") is not None,
                "1, or mlp_layer_types must be given: transformers reads that field alone",
            ),
            "head_dim": rotated_dims(_LATENT.rope_dim),
            "scoring_func": one_of("sigmoid", why="transformers has no other scores"),
            "topk_method": one_of("noaux_tc", why="transformers has no other choice"),
        },
        ignores=TRAINING_FIELDS
        | {"initializer_range", "num_mtp_layers", "num_nextn_predict_layers", "pretraining_tp"}
        | {"qk_head_dim"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
    unused=layers_after_the_last,
)
