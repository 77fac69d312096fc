"""Configs of architectures with towers, small enough for random weights."""

from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 1e4,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_HYBRID = {
    "head_dim": 16,
    "num_hidden_layers": 4,  # the last one has attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1}
_GEMMA4_EXPERTS = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 40,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
_TYPES = {
    "Gemma3": ("gemma3", "gemma3_text", {"head_dim": 16}),
    "Gemma4": ("gemma4", "gemma4_text", {**_GEMMA4, **_GEMMA4_EXPERTS}),
    "Gemma4Unified": ("gemma4_unified", "gemma4_unified_text", _GEMMA4),
    "Mistral3": ("mistral3", "mistral", {"head_dim": 16, "sliding_window": None}),
    "Qwen2VL": ("qwen2_vl", "qwen2_vl_text", {}),
    "Qwen2_5_VL": ("qwen2_5_vl", "qwen2_5_vl_text", {}),
    "Qwen3VL": ("qwen3_vl", "qwen3_vl_text", {"head_dim": 16}),
    "Qwen3VLMoe": ("qwen3_vl_moe", "qwen3_vl_moe_text", {"num_experts": 6, **EXPERTS}),
    "Qwen3_5": ("qwen3_5", "qwen3_5_text", _HYBRID),
    "Qwen3_5Moe": ("qwen3_5_moe", "qwen3_5_moe_text", {"num_experts": 6, **EXPERTS, **_HYBRID}),
    "Glm4v": ("glm4v", "glm4v_text", {}),
    "Glm4vMoe": ("glm4v_moe", "glm4v_moe_text", {"n_routed_experts": 6, **EXPERTS}),
}
NAMES = sorted(_TYPES)


def config_of(name: str, text: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    """config.json of an architecture, such as "Qwen3VL".

    Args:
        name: a key of the table above.
        text: changes of its text_config.
        outer: changes of the outer config.
    """
    outer_type, text_type, own = _TYPES[name]
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": outer_type,
        "text_config": {"model_type": text_type, **TEXT, **own, **(text or {})},
        "vision_config": {"hidden_size": 8},
        "tie_word_embeddings": False,
        **outer,
    }
