"""DeepSeek-V2 and V3: latent attention, then layers with experts and shared experts."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.expert_fields import (
    ROUTED_EXPERT_FIELDS,
    SIGMOID_ROUTER_FIELDS,
    TRAINING_FIELDS,
    layers_after_dense,
    read_routed_experts,
    read_sigmoid_router,
)
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family, layers_after_the_last
from rjax.models.families.field_table import field_table, one_of
from rjax.models.families.latent_fields import (
    LATENT_CONSTRAINTS,
    LATENT_FIELDS,
    latent_weights,
    read_latent_config,
    rotated_dims,
)
from rjax.models.latent_config import LatentConfig
from rjax.models.loading.pieces import Weights
from rjax.pallas_kernels.experts.base import Router

_NAMES = ExpertNames(shared="shared_experts")
_LATENT = LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
_CHOICES = {name: name for name in ("greedy", "group_limited_greedy")}
_IGNORED = TRAINING_FIELDS | {
    "aux_loss_alpha",
    "ep_size",
    "initializer_range",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "pretraining_tp",
    "qk_head_dim",
    "seq_aux",
}


def _read_v2(fields: ConfigFields) -> ModelConfig:
    config = read_latent_config(fields, "DeepseekV2ForCausalLM", _LATENT)
    router = Router(scale=fields.number("routed_scaling_factor", 1.0))
    if fields.choice("topk_method", _CHOICES, "greedy") == "group_limited_greedy":
        groups = fields.integer("n_group")
        router = dataclasses.replace(
            router,
            num_groups=groups,
            top_groups=fields.integer("topk_group", maximum=groups),
            group_best=1,
        )
    return dataclasses.replace(
        config,
        experts=read_routed_experts(
            fields,
            layers_after_dense(fields, config.num_layers, 0),
            router,
            experts=64,
            top_k=fields.integer("num_experts_per_tok"),
            width=1407,
            shared=2,
            other_name="num_experts",
        ),
    )


def _read_v3(fields: ConfigFields) -> ModelConfig:
    config = read_latent_config(
        fields,
        "DeepseekV3ForCausalLM",
        _LATENT,
        interleaved=fields.flag("rope_interleave", True, null=False),
    )
    return dataclasses.replace(
        config,
        experts=read_routed_experts(
            fields,
            layers_after_dense(fields, config.num_layers, 3),
            read_sigmoid_router(fields, 2.5, num_groups=8, top_groups=4),
            experts=256,
            top_k=8,
            width=2048,
            shared=1,
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return latent_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return latent_weights(config) | fused_expert_weights(config, _NAMES)


DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "DeepSeek-V2, V2-Lite and Coder-V2",
    field_table(
        ["deepseek_v2"],
        reads=LATENT_FIELDS
        | ROUTED_EXPERT_FIELDS
        | {"first_k_dense_replace", "n_group", "num_experts", "routed_scaling_factor"}
        | {"topk_group", "topk_method"},
        constraints={
            **LATENT_CONSTRAINTS,
            "mlp_bias": one_of(False, why="biases of the feed-forward blocks are not supported"),
            "norm_topk_prob": one_of(False, why="transformers ignores another value"),
            "scoring_func": one_of("softmax", why="transformers has no other scores"),
        },
        ignores=_IGNORED | {"head_dim"},
    ),
    _read_v2,
    _weights,
    fused_weights=_fused_weights,
    unused=layers_after_the_last,
)

DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3, V3.1 and R1, Moonlight",
    field_table(
        ["deepseek_v3"],
        reads=LATENT_FIELDS
        | ROUTED_EXPERT_FIELDS
        | SIGMOID_ROUTER_FIELDS
        | {"first_k_dense_replace", "num_local_experts", "rope_interleave"},
        constraints={
            **LATENT_CONSTRAINTS,
            "head_dim": rotated_dims(_LATENT.rope_dim),
            "scoring_func": one_of("sigmoid", why="transformers has no other scores"),
            "topk_method": one_of("noaux_tc", why="transformers has no other choice"),
        },
        ignores=_IGNORED,
    ),
    _read_v3,
    _weights,
    fused_weights=_fused_weights,
    unused=layers_after_the_last,
)
