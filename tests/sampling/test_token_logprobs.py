"""Log-probabilities against NumPy, for prompts and for samples."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sampling_cases import (
    EOS,
    EVERYTHING,
    SEQUENCES,
    WIDTH,
    Case,
    V,
    admitted,
    logits_of,
    made,
    step,
)
from sampling_reference import TooCloseError, probabilities

from rjax.sampling import SamplingParams, token_logprobs
from rjax.sampling.prompt_logprobs import most_likely
from tests.properties import num_examples

compiled = jax.jit(token_logprobs, static_argnames="k")


def expected_logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return (
        x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1))[:, None]
    )


@settings(max_examples=num_examples(30))
@given(st.integers(0, 2**31), st.lists(st.integers(0, V - 1), min_size=3, max_size=3))
def test_against_numpy(seed, targets):
    logits = logits_of(seed, 3)
    result = compiled(logits, np.array(targets), k=5)
    logprobs = expected_logprobs(logits)
    np.testing.assert_allclose(result.logprob, logprobs[range(3), targets], rtol=1e-5, atol=1e-6)
    for x, target, rank in zip(logits, targets, result.rank, strict=True):
        assert rank == 1 + sum(value > x[target] for value in x)
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :5]
    np.testing.assert_array_equal(result.top_ids, order)
    best = np.take_along_axis(logprobs, order, axis=-1)
    np.testing.assert_allclose(result.top_logprobs, best, rtol=1e-5, atol=1e-6)


@settings(max_examples=num_examples(30), deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 7]), st.sampled_from([1, 20]))
def test_the_most_likely_of_a_large_vocabulary_in_the_order_of_their_ids(seed, kinds, k):
    """With few kinds of values, most of them tie; -inf is one of them."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([[-np.inf], rng.standard_normal(kinds)]).astype(np.float32)
    x = rng.choice(values, (2, 64 * 50 + 9))
    found = jax.jit(most_likely, static_argnums=1)(x, k)
    for got, want in zip(found, jax.lax.top_k(x, k), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", [-1, V, 2**31 - 1])
def test_a_target_outside_the_vocabulary_has_none(target):
    result = compiled(logits_of(0, 1), np.array([target]), k=0)
    assert np.isneginf(result.logprob[0])
    assert result.rank[0] == 0
    assert result.top_ids.shape == (1, 0)


def test_samples_report_the_raw_logits():
    logits = logits_of(7, WIDTH)
    case = Case(EVERYTHING, prompt=(1, 2))
    state = admitted(dict.fromkeys(range(WIDTH), case))
    result, _ = step(
        logits,
        state,
        np.arange(WIDTH),
        np.ones(WIDTH, np.bool_),
        mode="full",
        num_logprobs=3,
    )
    raw = compiled(logits, result.tokens, k=3)
    for name in ("logprob", "rank", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(raw, name))


FIELDS = ("logprob", "rank", "top_ids", "top_logprobs")


def reported(logits, cases, mode, *, processed):
    """Tokens of one step and what is reported of them; row s has case s."""
    given = (logits, admitted(dict(enumerate(cases))), np.arange(WIDTH), np.ones(WIDTH, np.bool_))
    found, _ = step(*given, mode=mode, num_logprobs=V, processed_logprobs=processed)
    return found


def with_mode(case: Case, mode: str) -> Case:
    return dataclasses.replace(case, params=dataclasses.replace(case.params, logprobs_mode=mode))


@settings(max_examples=num_examples(60), suppress_health_check=[HealthCheck.filter_too_much])
@given(SEQUENCES, st.integers(0, 2**31))
def test_a_row_reports_the_distribution_that_it_asks_for(drawn, seed):
    """In one step, even rows the one that they sample from, odd rows the raw one."""
    case, logits = made(drawn), logits_of(seed, WIDTH)
    # A greedy token's distribution is that of temperature 1.
    params = dataclasses.replace(case.params, temperature=case.params.temperature or 1.0)
    try:
        case.params.check_model(V, V, EOS)
        want = [probabilities(x, params, case.prompt, case.output, EOS) for x in logits[::2]]
    except (TooCloseError, ValueError):
        assume(False)
    modes = [("processed_logprobs", "raw_logprobs")[s % 2] for s in range(WIDTH)]
    cases = [with_mode(case, mode) for mode in modes]
    found = reported(logits, cases, "full", processed=True)
    raw = reported(logits, cases, "full", processed=False)
    np.testing.assert_array_equal(found.tokens, raw.tokens)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(found, name)[1::2], getattr(raw, name)[1::2])
    for s, chances in zip(range(0, WIDTH, 2), want, strict=True):
        token = int(found.tokens[s])
        mine = np.empty(V)
        mine[found.top_ids[s]] = found.top_logprobs[s]
        np.testing.assert_allclose(np.exp(mine), chances, rtol=2e-5, atol=1e-9)
        np.testing.assert_array_equal(np.isneginf(mine), chances == 0)
        assert np.isfinite(found.logprob[s])
        assert found.logprob[s] == np.float32(mine[token])
        assert found.rank[s] == 1 + np.sum(mine > mine[token])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_processing_the_sampling_distribution_has_the_bits_of_the_raw_one(temperature):
    params = SamplingParams(temperature=temperature, logprobs_mode="processed_logprobs")
    logits = np.random.default_rng(3).normal(0, 9, (WIDTH, V)).astype(np.float32)
    cases = [Case(params, seed=s) for s in range(WIDTH)]
    for mode in ("random", "full"):
        found = reported(logits, cases, mode, processed=True)
        raw = reported(logits, cases, mode, processed=False)
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(found, name), getattr(raw, name))
