"""Engines whose KV pages are in float8_e4m3fn."""

import jax.numpy as jnp
import numpy as np
import pytest

from rjax.batch.page_groups import one_group
from rjax.errors import InvalidConfigError
from rjax.models import DenseAttention
from rjax.pallas_kernels.rope_and_cache.base import rotate
from rjax.sampling import SamplingParams
from rjax.worker.pages.pools import page_bytes

from .invariants import check
from .tiny import VOCAB, dense, make_engine, run

FP8 = jnp.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("no_annotations_checked", "kept")


class RoundedAttention(DenseAttention):
    """Plain attention over keys and values as float8_e4m3fn holds them."""

    def attend(self, layer, q, k, v, rotary, spec):
        q, k = rotate(q, rotary.cos, rotary.sin), rotate(k, rotary.cos, rotary.sin)
        k, v = (x.astype(FP8).astype(x.dtype) for x in (k, v))
        return super().attend(layer, q, k, v, None, spec)


def make(tiny, **options):
    # Few sizes of step and one way to sample, that few programs are compiled.
    small = {"kv_cache_dtype": "fp8", "max_num_seqs": 4, "max_num_batched_tokens": 4}
    return make_engine(tiny, **(small | options))


def greedy(count):
    return SamplingParams(temperature=0, max_tokens=count, logprobs=1)


def answers(outputs):
    """Tokens of each request, and the logprob of each token."""
    found = {key: out.outputs[0] for key, out in outputs.items()}
    return {
        key: (
            out.token_ids,
            [at[token].logprob for at, token in zip(out.logprobs, out.token_ids, strict=True)],
        )
        for key, out in found.items()
    }


def requests():
    """Over prompts that partly share beginnings."""
    rng = np.random.default_rng(0)
    stems = [rng.integers(0, VOCAB, size).tolist() for size in (40, 24, 0)]
    found = []
    for i in range(6):
        own = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        found.append((f"r{i}", stems[i % 3] + own, greedy(int(rng.integers(24, 40)))))
    return found


@pytest.fixture(scope="module")
def alone(tiny):
    """The answer to each request, one at a time, nothing cached."""
    engine = make(tiny, enable_prefix_caching=False, enable_relay_attention="off")
    found = {}
    for request in requests():
        found.update(answers(run(engine, [request])))
    return found


def test_tokens_and_logprobs_are_those_of_rounded_kv(tiny, alone):
    rounded = dense(tiny, RoundedAttention())
    for key, prompt, _ in requests():
        tokens, logprobs = alone[key]
        logits = rounded(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens
        want = logits.max(-1) - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(logprobs, want, atol=2e-5)  # rounding KV changes 1e-3 or so


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_relay_attention": "on", "preemption": "swap"},
        {"enable_relay_attention": "auto", "preemption": "recompute"},
    ],
    ids=["on-swap", "auto-recompute"],
)
def test_many_requests_through_a_small_pool(tiny, alone, options):
    engine = make(tiny, **options)
    found = answers(run(engine, requests()))
    for key, (tokens, logprobs) in alone.items():
        assert found[key][0] == tokens
        np.testing.assert_allclose(found[key][1], logprobs, atol=1e-5)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.cached_tokens > 0
    assert (stats.pages_swapped_in > 0) == (options["preemption"] == "swap")
    check(engine)


def test_a_page_takes_one_byte_a_number(tiny):
    engine = make(tiny, kv_cache_dtype="fp8_e4m3", swap_space="50KB")
    stats, worker = engine.stats(), engine._worker
    assert worker.kv_dtype == FP8
    model = engine.model_config
    for dtype, times in ((FP8, 1), (jnp.bfloat16, 2), (jnp.float32, 4)):
        each = page_bytes(model, one_group(model.num_layers), 8, jnp.dtype(dtype))
        assert times * stats.page_bytes == each
    assert stats.kv_bytes_total == sum(pool.nbytes for pool in worker._state.pools)
    assert worker.num_host_pages == 50_000 // stats.page_bytes


@pytest.mark.thorough
def test_a_saved_prefix_is_of_one_dtype(tiny, tmp_path):
    prefix = np.random.default_rng(0).integers(0, VOCAB, 27).tolist()
    request = ("a", [*prefix, 1], greedy(5))
    engine, path = make(tiny), tmp_path / "table"
    engine.add_prefix("table", prefix)
    engine.save_prefix("table", path)
    loaded = make(tiny, prefix_files=(str(path),))
    assert answers(run(loaded, [request])) == answers(run(engine, [request]))
    assert loaded.stats().cached_tokens == len(prefix)
    with pytest.raises(InvalidConfigError, match=r"saved with dtype 'float8_e4m3fn'; .* 'float32'"):
        make(tiny, kv_cache_dtype="auto", prefix_files=(str(path),))
