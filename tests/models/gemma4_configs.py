"""Configs of Gemma 4 small enough for random weights, with sizes that all formats can store."""

from tests.models.multimodal_cases import config_of

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": KINDS,
    "sliding_window": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 64,
    "hidden_size_per_layer_input": 0,
}
SMALL = SIZES | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 40,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
LARGE = SIZES | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
MIXTURE = LARGE | {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
}
TEXTS = {"small": SMALL, "large": LARGE, "mixture": MIXTURE}
"""The text models: E2B and E4B, 31B, 26B-A4B."""


def text_of(sizes, **changes):
    """config.json of the text model alone."""
    values = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    return values | sizes | {"dtype": "float32"} | changes


def whole_of(sizes, name="Gemma4"):
    """config.json of the model with towers."""
    sizes = {"num_experts": None, **sizes}
    return config_of(name, sizes, dtype="float32", tie_word_embeddings=True)
