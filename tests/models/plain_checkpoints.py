"""Random unquantised checkpoints of every family, and what the quantised ones mean."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rjax import models
from rjax.models.families import FAMILIES
from rjax.models.loading.pieces import tensor_shape
from rjax.models.loading.tensors import read_tensors

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
WHOLE_HEADS = {"num_key_value_heads": 4}  # so that the values can be scaled
OPT = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
FAMILY_CONFIGS = {
    "llama": LLAMA,
    "llama with biases": LLAMA | WHOLE_HEADS | {"attention_bias": True, "mlp_bias": True},
    "mistral": LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "qwen2": LLAMA
    | WHOLE_HEADS
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "phi3": LLAMA
    | WHOLE_HEADS
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0},
    "opt": OPT,
    "opt with gelu": OPT | {"activation_function": "gelu"},
}
PROMPTS = [[(7 * i + j * j) % 40 for j in range(9 + 5 * i)] for i in range(6)]


def write_plain(folder: Path, values: dict, seed: int = 0, outliers: float = 1.0) -> Path:
    """A random checkpoint.

    Args:
        folder: made.
        values: config.json.
        seed: of the weights.
        outliers: factor of four channels of each norm of the layers.
    """
    config = models.config_from_dict(values)
    draw = np.random.default_rng(seed)
    tensors = {}
    for path, pieces in FAMILIES[config.architecture].weights(config).items():
        for piece in pieces:
            norm = "norm.weight" in path
            value = draw.normal(1.0 if norm else 0.0, 0.15, tensor_shape(piece, config))
            if norm and piece.pattern == "D" and path.startswith("layers."):
                value[3::17] *= outliers
            tensors.setdefault(piece.tensor, value.astype(np.float32))
    return write_tensors(folder, values, tensors)


def write_tensors(folder: Path, values: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A checkpoint of these tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, those in fp8 too, which the library of safetensors refuses."""
    return {name: entry.read() for name, entry in read_tensors(folder).items()}


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """The tensors that a folder of compressed-tensors means, decoded number by number."""
    stored = stored_tensors(folder)
    tensors = {}
    for name, value in stored.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            tensors[f"{module}.weight"] = _unpacked(module, stored)
        elif kind == "weight" and f"{module}.weight_scale" in stored:
            scale = stored[f"{module}.weight_scale"].astype(np.float32)
            tensors[name] = value.astype(np.float32) * scale
        elif kind not in ("weight_scale", "weight_shape", "weight_zero_point"):
            tensors[name] = value
    return tensors


def _unpacked(module: str, stored: dict[str, np.ndarray]) -> np.ndarray:
    words, scale = stored[f"{module}.weight_packed"], stored[f"{module}.weight_scale"]
    zeros = stored.get(f"{module}.weight_zero_point")
    outputs, inputs = stored[f"{module}.weight_shape"].tolist()
    size = inputs // scale.shape[1]
    weight = np.zeros((outputs, inputs), np.float32)
    for n, k in np.ndindex(outputs, inputs):
        value = (int(words[n, k // 8]) >> (4 * (k % 8)) & 15) - 8
        if zeros is not None:
            value -= (int(zeros[n // 8, k // size]) >> (4 * (n % 8)) & 15) - 8
        weight[n, k] = np.float32(value) * np.float32(scale[n, k // size])
    return weight
