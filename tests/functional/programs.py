"""A tiny random model and what a plain forward pass says about a sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rjax import functional
from rjax.models import DenseAttention, config_from_dict, init_model

VOCAB = 61
CONFIG = config_from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
)


def tiny_model(mesh=None):
    """Weights large enough that the choice of token is not close to uniform."""
    model = init_model(CONFIG, dtype=jnp.float32, seed=3, mesh=mesh)
    graph, weights = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x * 6 if x.ndim > 1 else x, weights))


def prepared(**options):
    settings = {"max_context": 64, "page_size": 8, "kv_split_size": 16, "relay": "on"}
    return functional.prepare(tiny_model(options.get("mesh")), **(settings | options))


def prompts(count, longest=36, seed=0):
    """Token ids of random lengths, padded with junk, and the lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(longest // 2, longest + 1, count).astype(np.int32)
    lengths[0] = longest
    return jnp.asarray(rng.integers(0, VOCAB, (count, longest)), jnp.int32), jnp.asarray(lengths)


@functools.partial(jax.jit, static_argnums=0)
def dense_logprobs(graph, weights, tokens):
    """Log-probabilities [B, T, V] of what follows each token of whole sequences, no cache."""

    def one(sequence):
        model = nnx.merge(graph, weights)
        hidden = model(sequence, jnp.arange(sequence.shape[0]), DenseAttention())
        return jax.nn.log_softmax(model.logits(hidden))

    return jax.lax.map(one, tokens)


def scored(setup, weights, prompt, length, tokens):
    """Log-probabilities of the samples of one prompt by plain forward passes: [n, Z]."""
    n, Z = tokens.shape
    head = np.broadcast_to(np.asarray(prompt[:length]), (n, length))
    whole = np.concatenate([head, np.maximum(tokens, 0)], axis=1)
    padded = np.zeros((n, prompt.shape[0] + Z), np.int32)  # one shape for all prompts
    padded[:, : whole.shape[1]] = whole
    found = np.asarray(dense_logprobs(setup.graph, weights, jnp.asarray(padded)))
    here = found[:, length - 1 : length - 1 + Z]
    return np.take_along_axis(here, np.maximum(tokens, 0)[..., None], axis=2)[..., 0]
