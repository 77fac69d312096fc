"""`functional.rollout` on a GPU: kernels, device planner and refill beside a plain forward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax import functional
from rjax.models import config_from_dict, init_model
from tests.functional.programs import scored
from tests.gpu.test_families_on_gpu import fields_of

pytestmark = pytest.mark.gpu
NEW, SAMPLES = 40, 6
MEAN, MOST = 0.02, 0.3  # of bfloat16, which rounds elsewhere in a plain pass


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "qwen3_5_text"])
def test_rows_that_are_refilled_say_what_plain_forward_passes_do(family):
    """Prompts that share splits and fill pages in part; samples that outgrow a page."""
    model = init_model(config_from_dict(fields_of(family)), dtype=jnp.bfloat16, seed=5)
    setup, weights = functional.prepare(
        model, max_context=384, kv_split_size=64, relay="on", backend="mosaic"
    )
    lengths = jnp.asarray([300, 128, 1])
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 500, (3, 300)), jnp.int32)
    run = functools.partial(
        functional.rollout, setup, samples=SAMPLES, max_new_tokens=NEW, rows=8, num_pages=24
    )
    keys = jax.random.split(jax.random.key(0), 3)
    out = jax.tree.map(np.asarray, jax.jit(run)(weights, tokens, lengths, keys))
    assert (out.lengths == NEW).all()
    for a, length in enumerate(lengths.tolist()):
        want = scored(setup, weights, tokens[a], length, out.tokens[a])
        errors = np.abs(out.logprobs[a] - want)
        assert errors.mean() < MEAN
        assert errors.max() < MOST
