"""The text models of GLM-4.1V and GLM-4.5V: GLM-4 and GLM-4.5 with other defaults.

Their rotary embeddings have positions of three axes, which are equal for text.
"""

import dataclasses

from rjax.models.config import ModelConfig, NormConfig
from rjax.models.config_fields import ConfigFields
from rjax.models.families.expert_fields import (
    ROUTED_EXPERT_FIELDS,
    SIGMOID_ROUTER_FIELDS,
    TRAINING_FIELDS,
    layers_after_dense,
    read_routed_experts,
    read_sigmoid_router,
)
from rjax.models.families.family import Family, layers_after_the_last
from rjax.models.families.field_table import HEAD_DIM_OF_SIZE, NO_WINDOWS, field_table
from rjax.models.families.glm4 import GLM4
from rjax.models.families.glm4_moe import GLM4_MOE
from rjax.models.families.llama import LLAMA_FIELDS, read_llama_config
from rjax.models.families.rope_fields import RopeRules


def _read(fields: ConfigFields) -> ModelConfig:
    config = read_llama_config(
        fields,
        "Glm4vTextModel",
        has_head_dim=False,
        num_kv_heads=2,
        norm_eps=1e-5,
        rope=RopeRules(partial=True, interleaved=True),
    )
    return dataclasses.replace(config, qkv_bias=True, norms=NormConfig("sandwich"))


def _read_moe(fields: ConfigFields) -> ModelConfig:
    rope = RopeRules(partial=True, part=0.5)
    config = read_llama_config(
        fields, "Glm4vMoeTextModel", num_kv_heads=8, norm_eps=1e-5, rope=rope
    )
    return dataclasses.replace(
        config,
        qkv_bias=fields.flag("attention_bias", True),
        experts=read_routed_experts(
            fields,
            layers_after_dense(fields, config.num_layers, 1),
            read_sigmoid_router(fields, 1.0),
            experts=128,
            top_k=8,
            width=1408,
            shared=1,
        ),
    )


GLM4V_TEXT = Family(
    "Glm4vTextModel",
    "GLM-4.1V",
    field_table(
        ["glm4v_text"],
        reads=(LLAMA_FIELDS - {"head_dim"}) | {"partial_rotary_factor"},
        constraints={**HEAD_DIM_OF_SIZE, **NO_WINDOWS},
        ignores=["attention_bias", "initializer_range"],  # there always is a bias
    ),
    _read,
    GLM4.weights,
)
GLM4V_MOE_TEXT = Family(
    "Glm4vMoeTextModel",
    "GLM-4.5V",
    field_table(
        ["glm4v_moe_text"],
        reads=LLAMA_FIELDS
        | ROUTED_EXPERT_FIELDS
        | SIGMOID_ROUTER_FIELDS
        | {"attention_bias", "first_k_dense_replace", "num_local_experts"}
        | {"partial_rotary_factor"},
        constraints=NO_WINDOWS,
        ignores=TRAINING_FIELDS
        | {"initializer_range", "num_mtp_layers", "num_nextn_predict_layers", "use_qk_norm"},
    ),
    _read_moe,
    GLM4_MOE.weights,
    fused_weights=GLM4_MOE.fused_weights,
    unused=layers_after_the_last,
)
