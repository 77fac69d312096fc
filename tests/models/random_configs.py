"""Random config.json files of every family, in all the spellings that transformers reads.

It needs the standard library alone, so that an environment with torch can use it too.
"""

import random
from typing import Any

HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "opt", "phi3", *HYBRIDS)
_NAMES = {
    "opt": "OPT",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
}


def random_config(rng: random.Random, model_type: str) -> dict[str, Any]:
    """A small config that both transformers and this package can use."""
    layers = rng.randint(1, 3)
    heads = rng.choice([1, 2, 4])
    head_dim = rng.choice([8, 16])
    config: dict[str, Any] = {
        "architectures": [f"{_NAMES.get(model_type, model_type.capitalize())}ForCausalLM"],
        "model_type": model_type,
        "vocab_size": rng.randint(20, 60),
        "hidden_size": heads * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": rng.choice([64, 256, 1024]),
        "pad_token_id": None,
        "eos_token_id": None,
        "attention_dropout": rng.choice([0.0, 0.5]),
        "use_cache": rng.choice([True, False]),
        rng.choice(["dtype", "torch_dtype"]): "float32",
    }
    _maybe(config, rng, "tie_word_embeddings", [True, False])
    if model_type == "opt":
        config["ffn_dim"] = rng.randint(10, 40)
        _maybe(config, rng, "activation_function", ["relu", "gelu", "gelu_new", "silu"])
        _maybe(config, rng, "enable_bias", [True, False])
        _maybe(config, rng, "word_embed_proj_dim", [config["hidden_size"], None])
        _maybe(config, rng, "layerdrop", [0.5])
        return config
    config["intermediate_size"] = rng.randint(10, 40)
    config["num_key_value_heads"] = rng.choice([n for n in (1, 2, 4) if heads % n == 0])
    if model_type in ("llama", "phi3"):
        _maybe(config, rng, "num_key_value_heads", [None])
    _maybe(config, rng, "head_dim", [8, 16, 32])
    _maybe(config, rng, "rms_norm_eps", [1e-6, 1e-5, 1e-3])
    if model_type in HYBRIDS:
        _states_and_experts(config, rng, layers)
    else:
        _maybe(config, rng, "hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
    if model_type in ("llama", "qwen3", *HYBRIDS):
        _maybe(config, rng, "attention_bias", [True, False])
    if model_type == "llama":
        _maybe(config, rng, "mlp_bias", [True, False])
    _windows(config, rng, model_type, layers)
    if model_type == "ministral" or (model_type == "mistral" and "layer_types" in config):
        config.setdefault("head_dim", head_dim)  # transformers' Ministral needs it
    _rotary(config, rng, model_type)
    return config


def _maybe(config: dict[str, Any], rng: random.Random, name: str, values: list[Any]) -> None:
    if rng.random() < 0.6:
        config[name] = rng.choice(values)


def _states_and_experts(config: dict[str, Any], rng: random.Random, layers: int) -> None:
    key_heads = rng.choice([1, 2, 4])
    config["linear_num_key_heads"] = key_heads
    config["linear_num_value_heads"] = key_heads * rng.randint(1, 3)
    for name, values in (
        ("linear_conv_kernel_dim", [2, 3, 4]),
        ("linear_key_head_dim", [8, 16]),
        ("linear_value_head_dim", [8, 16]),
        ("num_experts", [8, 9]),
        ("num_experts_per_tok", [1, 2]),
        ("moe_intermediate_size", [8]),
    ):
        _maybe(config, rng, name, values)
    config.setdefault("num_experts_per_tok", min(8, config.get("num_experts", 8)))
    _maybe(config, rng, "hidden_act", ["silu"])
    interval = rng.randint(1, layers)
    if rng.random() < 0.5:
        config["full_attention_interval"] = interval
        return
    kinds = [rng.choice(["full_attention", "linear_attention"]) for _ in range(layers - 1)]
    config["layer_types"] = [*kinds, "full_attention"]
    _maybe(config, rng, "full_attention_interval", [interval])


def _windows(config: dict[str, Any], rng: random.Random, model_type: str, layers: int) -> None:
    if model_type == "llama" or model_type in HYBRIDS:
        return
    window = rng.choice([3, 7])
    if model_type == "phi3":
        _maybe(config, rng, "sliding_window", [window, None])
        return
    _maybe(config, rng, "sliding_window", [window] if model_type == "ministral" else [window, None])
    if model_type in ("qwen2", "qwen3"):
        _maybe(config, rng, "use_sliding_window", [True, False])
        _maybe(config, rng, "max_window_layers", list(range(layers + 1)))
    in_use = config.get("use_sliding_window", model_type in ("mistral", "ministral"))
    has_window = in_use and config.get("sliding_window", 4096) is not None
    if rng.random() < 0.5 and (has_window or model_type != "mistral"):
        kinds = ["full_attention", "sliding_attention"] if has_window else ["full_attention"]
        config["layer_types"] = [rng.choice(kinds) for _ in range(layers)]
    elif rng.random() < 0.2 and (has_window or model_type != "mistral"):
        config["layer_types"] = None


def _rotary(config: dict[str, Any], rng: random.Random, model_type: str) -> None:
    rope: dict[str, Any] = {}
    kind = (
        rng.choice(["default", "linear", "llama3", "yarn"]) if model_type != "phi3" else "default"
    )
    if kind != "default" or rng.random() < 0.5:
        rope[rng.choice(["type", "rope_type"])] = kind
    if kind != "default":
        rope["factor"] = rng.choice([2, 4.0, 7.5])
    if kind in ("llama3", "yarn"):
        original = config["max_position_embeddings"] // rng.choice([2, 4])
        _maybe(rope, rng, "original_max_position_embeddings", [original])
        _maybe(config, rng, "original_max_position_embeddings", [original, original // 2])
    if kind == "llama3":
        rope["low_freq_factor"] = rng.choice([1, 2.0])
        rope["high_freq_factor"] = rng.choice([4.0, 8])
        rope["rope_theta"] = 1e4  # transformers demands it of this type
    if kind == "yarn":
        _maybe(rope, rng, "beta_fast", [32, 16.0])
        _maybe(rope, rng, "beta_slow", [1, 2.0])
        _maybe(rope, rng, "truncate", [True, False, None])
        _maybe(rope, rng, "attention_factor", [1.25, None])
        _maybe(rope, rng, "mscale", [1.0, 0.7])
        _maybe(rope, rng, "mscale_all_dim", [0.5, 1])
    _maybe(rope, rng, "rope_theta", [5e3, 1e6])
    _maybe(config, rng, "rope_theta", [2e4, 10**7])
    if model_type == "phi3" or model_type in HYBRIDS:
        _maybe(rng.choice([rope, config]), rng, "partial_rotary_factor", [0.5, 1.0])
    spelling = rng.choice(["rope_parameters", "rope_scaling"])
    config[spelling] = rope
    if spelling == "rope_scaling":
        # transformers takes rope_scaling unless it is empty.
        _maybe(config, rng, "rope_parameters", [{"rope_type": "default", "rope_theta": 3e3}, None])
    else:
        _maybe(config, rng, "rope_scaling", [{}, None])
