"""GLM-4.5 to 4.7: Llama with half rotated heads, then layers with experts and a shared expert."""

import dataclasses

from rjax.models.config import ModelConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.errors import CheckpointError
from rjax.models.experts_config import ExpertsConfig, Router
from rjax.models.families.expert_fields import TRAINING_FIELDS
from rjax.models.families.expert_weights import ExpertNames, expert_weights, fused_expert_weights
from rjax.models.families.family import Family
from rjax.models.families.field_table import NO_WINDOWS, field_table
from rjax.models.families.llama import LLAMA_FIELDS, llama_weights, read_llama_config
from rjax.models.families.rope_fields import RopeRules
from rjax.models.loading.piece import Weights

_NAMES = ExpertNames(shared="shared_experts")
_ROUTER_FIELDS = frozenset(
    {
        "n_group",
        "n_routed_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "norm_topk_prob",
        "routed_scaling_factor",
        "topk_group",
    }
)


def _read(fields: ConfigFields) -> ModelConfig:
    rope = RopeRules(partial=True, part=0.5)
    config = read_llama_config(
        fields, "Glm4MoeForCausalLM", num_kv_heads=8, norm_eps=1e-5, rope=rope
    )
    name = "num_local_experts" if fields.has("num_local_experts") else "n_routed_experts"
    experts: int = fields.integer(name, 128)
    groups: int = fields.integer("n_group", 1)
    if experts % groups or experts // groups < 2:
        raise CheckpointError(
            f"config.json: n_group is {groups} and {name} {experts}; each group must have the same "
            "number of experts, at least 2"
        )
    width: int = fields.integer("moe_intermediate_size", 1408)
    dense = fields.integer("first_k_dense_replace", 1, minimum=0)
    return dataclasses.replace(
        config,
        qk_norm=fields.flag("use_qk_norm", False),
        qkv_bias=fields.flag("attention_bias", False),
        experts=ExpertsConfig(
            num_experts=experts,
            top_k=fields.integer("num_experts_per_tok", 8, maximum=experts),
            width=width,
            layers=tuple(i >= dense for i in range(config.num_layers)),
            router=Router(
                score="sigmoid",
                renormalise=fields.flag("norm_topk_prob", True),
                scale=fields.number("routed_scaling_factor", 1.0),
                correction_bias=True,
                num_groups=groups,
                top_groups=fields.integer("topk_group", 1, maximum=groups),
            ),
            shared_width=width * fields.integer("n_shared_experts", 1),
        ),
    )


def _weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | expert_weights(config, _NAMES)


def _fused_weights(config: ModelConfig) -> Weights:
    return llama_weights(config) | fused_expert_weights(config, _NAMES)


def _predicts_more_tokens(config: ModelConfig) -> tuple[str, ...]:
    """The layers after the last, which predict further tokens; they are not used."""
    return (f"model.layers.{config.num_layers}.",)


GLM4_MOE = Family(
    "Glm4MoeForCausalLM",
    "GLM-4.5, 4.6 and 4.7",
    field_table(
        ["glm4_moe"],
        reads=LLAMA_FIELDS
        | _ROUTER_FIELDS
        | {"attention_bias", "first_k_dense_replace", "moe_intermediate_size"}
        | {"n_shared_experts", "partial_rotary_factor", "use_qk_norm"},
        constraints=NO_WINDOWS,
        ignores=TRAINING_FIELDS
        | {"initializer_range", "num_mtp_layers", "num_nextn_predict_layers"},
    ),
    _read,
    _weights,
    fused_weights=_fused_weights,
    unused=_predicts_more_tokens,
)
