"""Golden checkpoints whose layers differ in their KV, or have a state in place of it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rjax import functional
from rjax.models import load_model

MODELS = Path(__file__).parents[1] / "golden" / "families" / "models"
GEMMA_4 = (
    "gemma4_g2_h16_inputs_shared_kv",
    "gemma4_g6_h32_keys_are_values",
    "gemma4moe_j7_k3_global_heads",
    "gemma4u_g4_h48_full_last",
)
HYBRIDS = (
    "qwen3_5_r3_g2_linear_last",
    "qwen3_next_r2_g3_tied_fused",
    "qwen3_5_moe_r2_g3_fused",
    "qwen3_5_moe_r3_g1_tied",
    "qwen3_5_r5_g1_tied_yarn",
    "qwen3_next_r3_g1_dense_layer",
)
LENGTH, SAMPLES, NEW = 64, 3, 11
# A plain pass computes 64 tokens of a state at once and a rollout 8, whose rounding differs: plain
# passes of 8 and of 64 differ by up to 7e-5 too.
TOLERANCE = 3e-4


@functools.cache
def model(name):
    return load_model(MODELS / name, dtype="float32", progress=False, max_length=LENGTH).model


def prepared(name, **options):
    settings = {"max_context": LENGTH, "page_size": 8, "kv_split_size": 16, "relay": "on"}
    return functional.prepare(model(name), **(settings | options))


def prompts():
    """Prompts that fill splits, that fill pages with and without their last token, and of one."""
    lengths = jnp.asarray([33, 24, 1, 17])
    tokens = np.random.default_rng(0).integers(3, 60, (4, 33))
    return jnp.asarray(tokens, jnp.int32), lengths


def rolled(name, prompt=slice(None), relay="on", **sizes):
    """The samples of all prompts, or of those of a slice."""
    setup, weights = prepared(name, relay=relay)
    run = functools.partial(functional.rollout, setup, samples=SAMPLES, max_new_tokens=NEW, **sizes)
    keys = jax.random.split(jax.random.key(0), 4)
    batch = [x[prompt] for x in (*prompts(), keys)]
    return jax.tree.map(np.asarray, jax.jit(run)(weights, *batch))
