"""A rollout with fewer rows than samples: the same tokens as with all samples at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax import functional
from rjax.functional.rollout import Rollout
from tests.functional.programs import VOCAB, dense_logprobs, prepared, prompts

PROMPTS, SAMPLES, NEW = 5, 4, 10
REFILL: dict[str, Any] = {"rows": 6, "max_num_batched_tokens": 24}
SCARCE: dict[str, Any] = REFILL | {"num_pages": 15, "tail_rows": (2,)}


@functools.cache
def program(relay="on", **sizes) -> Any:
    """The setup, its weights and the jitted rollout with what may be traced as arguments."""
    setup, weights = prepared(relay=relay)

    def run(weights, tokens, lengths, keys, **traced):
        return functional.rollout(
            setup,
            weights,
            tokens,
            lengths,
            keys,
            samples=SAMPLES,
            max_new_tokens=NEW,
            top_p=0.9,
            **traced,
            **sizes,
        )

    return setup, weights, jax.jit(run)


def rolled(sizes: dict[str, Any], prompt=slice(None), **traced) -> Rollout:
    """The samples of all prompts, or of those of a slice."""
    _, weights, run = program(**sizes)
    options = {
        "end_token": [7, -1],
        "stop_token_ids": np.full((PROMPTS, 2), -1),
        "ignore_eos": np.zeros(PROMPTS, bool),
        "max_tokens": np.full(PROMPTS, NEW),
        "temperature": np.full(PROMPTS, 0.8, np.float32),
    }
    given = {name: jnp.asarray(value) for name, value in (options | traced).items()}
    given = {k: v if k == "end_token" else v[prompt] for k, v in given.items()}
    keys = jax.random.split(jax.random.key(2), PROMPTS)
    batch = [x[prompt] for x in (*prompts(PROMPTS), keys)]
    return jax.tree.map(np.asarray, run(weights, *batch, **given))


VARIED: dict[str, Any] = {
    "end_token": [7, 30],
    "stop_token_ids": [[3, -1], [-1, -1], [11, 12], [-1, 5], [-1, -1]],
    "ignore_eos": [False, True, True, False, False],
    "max_tokens": [10, 10, 3, 1, 7],
    "temperature": [0.8, 1.0, 0.0, 1.5, 0.6],
}


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(SCARCE, marks=pytest.mark.thorough),
        pytest.param(REFILL, marks=pytest.mark.slow),
    ],
    ids=["scarce", "refill"],
)
def test_refilled_rows_give_the_tokens_of_all_at_once(sizes):
    for traced in ({}, VARIED):
        want, got = rolled({}, **traced), rolled(sizes, **traced)
        for name in ("tokens", "lengths", "truncated"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), name)
        for name in ("logprobs", "processed_logprobs"):
            np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=1e-5)
    assert program(**sizes)[2]._cache_size() == 1, "nothing compiles for other values"


@pytest.mark.slow
def test_a_prompt_alone_and_without_relay_has_the_same_tokens():
    want = rolled(SCARCE, **VARIED)
    longer: dict[str, Any] = VARIED | {"max_tokens": [NEW] * PROMPTS}
    alone = rolled({}, slice(3, 4), **longer)
    free = rolled(SCARCE, **longer)
    np.testing.assert_array_equal(alone.tokens[0], free.tokens[3])
    off = rolled(SCARCE | {"relay": "off"}, **VARIED)
    np.testing.assert_array_equal(off.tokens, want.tokens)
    np.testing.assert_allclose(off.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.thorough
def test_samples_end_where_their_prompt_says():
    free = rolled(SCARCE, end_token=[-1, -1])
    assert free.truncated.all()
    assert (free.lengths == NEW).all()
    most = np.repeat(np.asarray(VARIED["max_tokens"])[:, None], SAMPLES, 1)
    most[:, 2] -= 1  # 0 counts as 1
    of_each = {"temperature": np.full(PROMPTS, 0.8), "max_tokens": most}
    out = rolled(SCARCE, **VARIED | of_each)
    for a in range(PROMPTS):
        ends = {t for t in VARIED["stop_token_ids"][a] if t >= 0}
        ends |= set() if VARIED["ignore_eos"][a] else set(VARIED["end_token"])
        for i in range(SAMPLES):
            row = free.tokens[a, i, : max(1, most[a, i])]
            at = np.flatnonzero(np.isin(row, list(ends)))
            length = at[0] + 1 if at.size else row.size
            assert out.lengths[a, i] == length
            assert out.truncated[a, i] == (not at.size)
            np.testing.assert_array_equal(out.tokens[a, i, :length], row[:length])
            assert (out.tokens[a, i, length:] == -1).all()
    assert out.truncated.any()
    assert not out.truncated.all()


@pytest.mark.thorough
def test_log_probabilities_are_those_of_a_plain_forward_pass():
    setup, weights, _ = program(**SCARCE)
    out = rolled(SCARCE, **VARIED)
    tokens, lengths = prompts(PROMPTS)
    for a in range(PROMPTS):
        start, length = int(lengths[a]), int(out.lengths[a, 0])
        whole = np.zeros((1, tokens.shape[1] + NEW), np.int32)
        whole[0, :start] = tokens[a, :start]
        whole[0, start : start + length] = out.tokens[a, 0, :length]
        every = np.asarray(dense_logprobs(setup.graph, weights, jnp.asarray(whole)))[0]
        raw = every[start - 1 : start - 1 + length].astype(np.float64)
        chosen = np.asarray(out.tokens)[a, 0, :length]
        want = np.take_along_axis(raw, chosen[:, None], 1)[:, 0]
        np.testing.assert_allclose(out.logprobs[a, 0, :length], want, atol=3e-5)
        want = np.take_along_axis(processed(raw, VARIED["temperature"][a], 0.9), chosen[:, None], 1)
        np.testing.assert_allclose(out.processed_logprobs[a, 0, :length], want[:, 0], atol=1e-4)
    assert not out.logprobs[out.tokens < 0].any()
    assert not out.processed_logprobs[out.tokens < 0].any()


def processed(logits, temperature, top_p):
    """Log-probabilities [B, V] after temperature and top-p, by sorting, in float64."""
    x = logits / (temperature or 1.0)
    chances = np.exp(x - x.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    order = np.argsort(-chances, axis=1)
    ordered = np.take_along_axis(chances, order, 1)
    kept = np.cumsum(ordered, axis=1) - ordered < top_p
    np.put_along_axis(chances, order, np.where(kept, ordered, 0.0), 1)
    with np.errstate(divide="ignore"):
        return np.log(chances / chances.sum(axis=1, keepdims=True))


def test_a_token_has_its_chance_in_the_distribution_it_was_drawn_from():
    logits = 3 * np.random.default_rng(0).standard_normal((6, VOCAB)).astype(np.float32)
    heat = np.asarray([0.0, 0.3, 0.7, 1.0, 1.3, 2.0], np.float32)
    keys = jax.random.split(jax.random.key(0), 6)
    for top_p in (1.0, 0.8):
        found = functional.sample(
            jnp.asarray(logits), keys, temperature=jnp.asarray(heat), top_p=top_p
        )
        assert found.processed_logprobs.dtype == found.logprobs.dtype == jnp.float32
        for b in range(6):
            token, row = int(found.tokens[b]), logits[b : b + 1].astype(np.float64)
            want = processed(row, float(heat[b]), top_p)[0, token]
            np.testing.assert_allclose(found.processed_logprobs[b], want, atol=1e-5)
            np.testing.assert_allclose(found.logprobs[b], processed(row, 1, 1)[0, token], atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 0}, "rows is 0; give at least 1"),
        ({"tail_rows": (4, 0)}, r"tail_rows is \(4, 0\)"),
        ({"num_pages": 7}, "num_pages is 7; one prompt takes up to 5 pages and one sample 3: give"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    setup, weights = prepared()
    keys = jax.random.split(jax.random.key(0), 2)
    with pytest.raises(ValueError, match=message):
        functional.rollout(
            setup, weights, *prompts(2), keys, samples=2, max_new_tokens=NEW, **sizes
        )
