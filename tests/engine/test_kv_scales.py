"""Engines with the KV scales of a checkpoint, held to a float32 reference with the same scales.

The checkpoint is one that llm-compressor calibrated and wrote (``ct-fp8-kv`` of the goldens).
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from rjax.models import DenseAttention, load_model
from rjax.models.loading.tensors import read_tensors
from rjax.pallas_kernels.rope_and_cache.base import rotate, split_qkv
from rjax.sampling import SamplingParams

from .tiny import make_engine, run

GOLDEN = Path(__file__).parents[1] / "golden" / "quantised" / "ct-fp8-kv"
SCALES = tuple(f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale"))
PROMPT = np.random.default_rng(3).integers(3, 96, 40).tolist()
PARAMS = SamplingParams(
    temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0
)
# Both compute in float32 and round KV to the same fp8 numbers; they differ by the order of sums,
# 1.5e-6 as measured. Wrong scales change a logprob by 0.04 or more.
TOLERANCE = 1e-5
EFFECT = 1000 * TOLERANCE


class ScaledAttention(DenseAttention):
    """Plain attention over keys and values as float8_e4m3fn with the scales k and v holds them."""

    def __init__(self, k: float, v: float) -> None:
        self.scales = k, v

    def attention(self, layer, qkv, rotary, spec, kv_scales=None):
        q, k, v = split_qkv(qkv)
        q, k = (rotate(x, rotary.cos, rotary.sin) for x in (q, k))
        k, v = (self._stored(x, scale) for x, scale in zip((k, v), self.scales, strict=True))
        return self.attend(layer, q, k, v, None, spec)

    def _stored(self, x, scale):
        return jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) * scale


def scales_of(folder):
    tensors = read_tensors(folder)
    return tuple(float(tensors[name].read().astype(np.float32).item()) for name in SCALES)


@pytest.fixture
def rescaled(tmp_path):
    """What writes the golden checkpoint with its KV scales times two factors."""

    def write(k, v):
        folder = shutil.copytree(GOLDEN, tmp_path / f"{k}-{v}")
        tensors = {name: entry.read() for name, entry in read_tensors(folder).items()}
        for name, factor in zip(SCALES, (k, v), strict=True):
            tensors[name] = (tensors[name].astype(np.float32) * factor).astype(np.float32)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return write


def served(folder, **options):
    """The tokens of a greedy answer, and the logprob of each token after the first of all."""
    options = {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 16} | options
    engine = make_engine(folder, load_format="auto", dtype="float32", **options)
    output = run(engine, [("a", PROMPT, PARAMS)])["a"]
    tokens = output.outputs[0].token_ids
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    found = zip(entries, [*PROMPT[1:], *tokens], strict=True)
    return tokens, np.array([entry[token].logprob for entry, token in found])


def reference(folder, tokens, attention):
    """The logprobs of the same tokens by one forward pass in float32."""
    model = load_model(folder, dtype="float32", progress=False).model
    ids = jnp.asarray([*PROMPT, *tokens])
    logits = model.logits(model(ids, jnp.arange(len(ids)), attention))
    logprobs = np.asarray(jax.nn.log_softmax(logits))
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


# The file's scales; scales that clip keys; that clip values; that make small numbers subnormal.
@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("factors", [(1, 1), (0.3, 1), (1, 0.3), (700, 500)])
def test_logprobs_are_those_of_kv_quantised_with_the_scales(rescaled, factors):
    folder = rescaled(*factors)
    tokens, logprobs = served(folder)
    scales = scales_of(folder)
    assert scales == pytest.approx([s * f for s, f in zip(scales_of(GOLDEN), factors, strict=True)])
    want = reference(folder, tokens, ScaledAttention(*scales))
    np.testing.assert_allclose(logprobs, want, atol=TOLERANCE)
    for other in (1.0, 1.0), scales_of(GOLDEN):
        if other != scales:
            wrong = reference(folder, tokens, ScaledAttention(*other))
            assert np.abs(logprobs - wrong).max() > EFFECT


@pytest.mark.thorough
def test_scales_change_nothing_without_fp8_kv(rescaled):
    tokens, logprobs = served(GOLDEN, kv_cache_dtype="auto")
    other_tokens, others = served(rescaled(0.3, 700), kv_cache_dtype="auto")
    assert tokens == other_tokens
    np.testing.assert_array_equal(logprobs, others)
    np.testing.assert_allclose(
        logprobs, reference(GOLDEN, tokens, DenseAttention()), atol=TOLERANCE
    )
