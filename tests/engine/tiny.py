"""A tiny random model for engine tests, and what it answers one sequence at a time."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.build.engine_builder import build_engine
from rjax.config import EngineConfig
from rjax.engine.llm_engine import LLMEngine
from rjax.models import DenseAttention, Operations, load_model

VOCAB, LENGTH = 97, 160

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_config(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def make_engine(folder: Path, **options) -> LLMEngine:
    """An engine over the tiny model with small pages and chunks; options override."""
    settings = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "page_size": 8,
        "num_pages": 24,  # in nearly all tests, so that they share what is compiled
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "use_tqdm": False,
        "kv_split_size": 16,
        "seed": 5,
    }
    return build_engine(EngineConfig.from_options(settings | options))


def run(engine: LLMEngine, requests, *, steps: int = 10_000):
    """Run (id, tokens, params) requests to the end; outputs by id."""
    for request_id, tokens, params in requests:
        engine.add_request(request_id, tokens, params)
    done = {}
    for _ in range(steps):
        if not engine.has_unfinished_requests():
            return done
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    pytest.fail("requests left unfinished")


def dense(folder: Path, attention: Operations | None = None) -> Callable[[list[int]], np.ndarray]:
    """What gives the float32 logits at each position of a sequence by one plain forward pass."""
    attention = attention or DenseAttention()
    loaded = load_model(folder, dtype=jnp.float32, load_format="dummy", seed=5, progress=False)

    @jax.jit
    def logits(ids):
        return loaded.model.logits(loaded.model(ids, jnp.arange(LENGTH), attention))

    # No position sees those behind it, so one length of program serves all sequences.
    return lambda ids: np.asarray(logits(jnp.asarray(ids + [0] * (LENGTH - len(ids)))))[: len(ids)]
