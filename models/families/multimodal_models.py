"""The architectures with towers for other media, whose text models are loaded."""

from collections.abc import Mapping
from typing import Any

from rjax.models.families.family import Family
from rjax.models.families.gemma import GEMMA3_TEXT
from rjax.models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from rjax.models.families.glm4v import GLM4V_MOE_TEXT, GLM4V_TEXT
from rjax.models.families.ministral3 import MINISTRAL3
from rjax.models.families.mistral import MISTRAL
from rjax.models.families.multimodal import (
    BESIDE_TOWERS,
    CAUSAL_MODEL,
    NESTED,
    WITHOUT_HEAD,
    Multimodal,
)
from rjax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from rjax.models.families.qwen_vl import (
    QWEN2_5_VL_TEXT,
    QWEN2_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
)

_VIDEO = "images and video"
_LLAVA: Mapping[str, Any] = {
    "towers": ("vision_tower", "multi_modal_projector"),
    "layouts": (NESTED, CAUSAL_MODEL, WITHOUT_HEAD),
    "tied": True,
}
_GEMMA4: Mapping[str, Any] = {
    "towers": ("vision_tower", "audio_tower", "vision_embedder", "embed_vision", "embed_audio"),
    "outer": (
        *("audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id"),
        *("eoa_token_index", "eoi_token_id", "image_token_id", "initializer_range"),
        *("video_token_id", "vision_soft_tokens_per_image"),
    ),
    "media": "images, video and audio",
    "tied": True,
}
_GEMMA4_SIZES = {  # defaults of the config classes
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_VISUAL: Mapping[str, Any] = {"towers": ("visual",), "media": _VIDEO}
_QWEN_TOKENS = ("image_token_id", "video_token_id", "vision_end_token_id", "vision_start_token_id")
_GLM_TOKENS = (
    *("image_token_id", "image_start_token_id", "image_end_token_id"),
    *("video_token_id", "video_start_token_id", "video_end_token_id"),
)


def _qwen2_vl(architecture: str, models: str, model_type: str, text: Family) -> Multimodal:
    return Multimodal(
        *(architecture, models, model_type, (text,)),
        outer=_QWEN_TOKENS,
        layouts=(NESTED, BESIDE_TOWERS),
        text_ties=True,
        flat=True,
        **_VISUAL,
    )


MULTIMODAL = (
    Multimodal(
        *("Gemma3ForConditionalGeneration", "Gemma 3 (4B and larger)", "gemma3", (GEMMA3_TEXT,)),
        outer=(
            *("boi_token_index", "eoi_token_index", "image_token_index", "initializer_range"),
            "mm_tokens_per_image",
        ),
        defaults={  # a small part of them is in the published files
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
        },
        **_LLAVA,
    ),
    Multimodal(
        "Gemma4ForConditionalGeneration",
        "Gemma 4: 26B-A4B, 31B, E2B, E4B",
        "gemma4",
        (GEMMA4,),
        defaults={**_GEMMA4_SIZES, "max_position_embeddings": 131_072},
        **_GEMMA4,
    ),
    Multimodal(
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma 4 12B",
        "gemma4_unified",
        (GEMMA4_UNIFIED,),
        defaults={**_GEMMA4_SIZES, "max_position_embeddings": 262_144},
        **_GEMMA4,
    ),
    Multimodal(
        "Mistral3ForConditionalGeneration",
        "Mistral Small 3.1 and 3.2, Ministral 3",
        "mistral3",
        (MISTRAL, MINISTRAL3),
        outer=(
            *("image_token_index", "multimodal_projector_bias", "projector_hidden_act"),
            *("spatial_merge_size", "vision_feature_layer"),
        ),
        **_LLAVA,
    ),
    _qwen2_vl("Qwen2VLForConditionalGeneration", "Qwen2-VL", "qwen2_vl", QWEN2_VL_TEXT),
    _qwen2_vl("Qwen2_5_VLForConditionalGeneration", "Qwen2.5-VL", "qwen2_5_vl", QWEN2_5_VL_TEXT),
    Multimodal(
        *("Qwen3VLForConditionalGeneration", "Qwen3-VL (dense)", "qwen3_vl", (QWEN3_VL_TEXT,)),
        outer=_QWEN_TOKENS,
        **_VISUAL,
    ),
    Multimodal(
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3-VL (mixture of experts), such as 30B-A3B",
        "qwen3_vl_moe",
        (QWEN3_VL_MOE_TEXT,),
        outer=_QWEN_TOKENS,
        **_VISUAL,
    ),
    Multimodal(
        *("Qwen3_5ForConditionalGeneration", "Qwen3.5, 3.6 and 3.8 (dense)", "qwen3_5", (QWEN3_5,)),
        outer=_QWEN_TOKENS,
        **_VISUAL,
    ),
    Multimodal(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3.5, 3.6 and 3.8 (mixture of experts), such as 35B-A3B",
        "qwen3_5_moe",
        (QWEN3_5_MOE,),
        outer=_QWEN_TOKENS,
        **_VISUAL,
    ),
    Multimodal(
        *("Glm4vForConditionalGeneration", "GLM-4.1V", "glm4v", (GLM4V_TEXT,)),
        outer=_GLM_TOKENS,
        text_ties=True,
        **_VISUAL,
    ),
    Multimodal(
        *("Glm4vMoeForConditionalGeneration", "GLM-4.5V", "glm4v_moe", (GLM4V_MOE_TEXT,)),
        outer=_GLM_TOKENS,
        text_ties=True,
        **_VISUAL,
    ),
)
