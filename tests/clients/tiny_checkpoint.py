"""A tiny random Llama with the tokenizer of the tests, as a checkpoint that trainers load."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.serve.live_server import CONFIG, write_model


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write configuration, tokenizer and float32 weights into a folder."""
    write_model(folder)
    weights = random_weights(folder, seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_weights(folder: Path, seed: int) -> dict[str, np.ndarray]:
    """Float32 weights for the configuration of `write_model` in this folder."""
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    draw = np.random.default_rng(seed)
    width, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    rows = head * CONFIG["num_attention_heads"], head * CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, width),
        "lm_head.weight": (vocab_size, width),
        "model.norm.weight": (width,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (rows[0], width),
            "self_attn.k_proj": (rows[1], width),
            "self_attn.v_proj": (rows[1], width),
            "self_attn.o_proj": (width, rows[0]),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else draw.normal(0, 0.2, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
