"""Group sampling lowers for a Hopper GPU: the loop, the planner and the kernels in one program."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from rjax import functional
from rjax.benchmarks.model_shapes import SHAPES
from rjax.models import config_from_dict, init_model
from rjax.worker.backend import choose_backend
from tests.engine.test_heads_of_512 import FIELDS as GEMMA_4
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


HYBRID = config_from_dict(
    SHAPES["qwen3.5-35b-a3b"]
    | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    | {"vocab_size": 61, "num_experts": 8, "num_experts_per_tok": 2}
)
DECODE_STATES = (
    "causal_conv_step_kernel",
    "gated_delta_decode_kernel",
    "states_after_pages_kernel",
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "backend", "others"),
    [
        (CONFIG, "mosaic", ()),
        (config_from_dict(GEMMA_4 | {"vocab_size": 61}), "auto", ()),
        (HYBRID, "auto", (*DECODE_STATES, "inter_chunk_kernel")),
    ],
    ids=["llama", "gemma4", "hybrid"],
)
def test_a_rollout_lowers_for_cuda(config, backend, others):
    model = init_model(config, dtype=jnp.bfloat16)
    setup, weights = functional.prepare(model, max_context=512, relay="on")
    kernels = choose_backend(
        backend,
        platform="gpu",
        compute_capability=9.0,
        model=config,
        dtype=jnp.bfloat16,
        page_size=setup.page_size,
    )
    assert kernels.name == "mosaic"
    setup = dataclasses.replace(setup, backend=kernels)
    run = functools.partial(functional.rollout, setup, samples=16, max_new_tokens=32, rows=8)
    tokens, lengths = prompts(2, longest=200)
    keys = jax.random.split(jax.random.key(0), 2)
    traced = jax.jit(run).trace(weights, tokens, lengths, keys)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2  # the prompts' attention and the loop's
    for kernel in ("attention_kernel", *others):
        assert kernel in text
