"""Group sampling lowers for a Hopper GPU: the loop, the planner and the kernels in one program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from rjax import functional
from rjax.models import config_from_dict, init_model
from rjax.worker.backend import choose_backend
from tests.functional.programs import prompts

CONFIG = config_from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 61,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
)


@pytest.mark.thorough
def test_a_rollout_lowers_for_cuda():
    model = init_model(CONFIG)
    setup, weights = functional.prepare(model, max_context=512, relay="on")
    kernels = choose_backend(
        "mosaic",
        platform="gpu",
        compute_capability=9.0,
        model=CONFIG,
        dtype=jnp.bfloat16,
        page_size=setup.page_size,
    )
    setup = dataclasses.replace(setup, backend=kernels)
    run = functools.partial(functional.rollout, setup, samples=16, max_new_tokens=32, rows=8)
    tokens, lengths = prompts(2, longest=200)
    keys = jax.random.split(jax.random.key(0), 2)
    traced = jax.jit(run).trace(weights, tokens, lengths, keys)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2  # the prompts' attention and the loop's
