"""The sampler against the plain reference, feature by feature and all together."""

import functools

import jax
import jax.numpy as jnp
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
    full_scaled,
    logits_of,
    made,
    step,
)
from sampling_reference import TooCloseError, probabilities
from scipy import stats

from rjax.sampling import SamplingParams
from rjax.sampling.sampler import first_largest, gumbel_argmax, gumbel_noise, gumbel_quantile
from rjax.sampling.truncation import truncate
from tests.properties import num_examples

FEATURES = [
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=2**31 - 1),
    SamplingParams(top_p=0.83),
    SamplingParams(top_p=1e-30),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.07),
    SamplingParams(min_p=1.0),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(repetition_penalty=0.6),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=1.5),
    SamplingParams(frequency_penalty=-2.0),
    SamplingParams(min_tokens=6, stop_token_ids=[1, 2]),
    SamplingParams(min_tokens=6, stop_token_ids=[1, 2], ignore_eos=True),
    SamplingParams(min_tokens=5, stop_token_ids=[1, 2]),
    SamplingParams(logit_bias={3: 4.5, V - 1: -100.0}),
    SamplingParams(allowed_token_ids=[31, 32, V - 1]),
    SamplingParams(temperature=0.0, logit_bias={3: 100.0}),
    EVERYTHING,
]


def check(case: Case, logits: np.ndarray) -> None:
    expected = probabilities(logits, case.params, case.prompt, case.output, EOS)
    rows = jax.tree.map(lambda field: field[:1], admitted({0: case}))
    x = full_scaled(logits[None], rows)[0]
    if not case.params.greedy:
        np.testing.assert_allclose(jax.nn.softmax(x), expected, rtol=2e-5, atol=1e-9)
    result, _ = step(
        logits[None],
        admitted({0: case}),
        np.array([0]),
        np.array([True]),
        mode="full",
        num_logprobs=0,
    )
    assert expected[int(result.tokens[0])] > 0


@pytest.mark.parametrize("params", FEATURES, ids=lambda p: p.sampler_mode)
def test_feature(params):
    compared = 0
    for seed in range(4):
        case = Case(params, seed, prompt=(1, 2, 3, 38), output=(3, 4, 4, 4, 39))
        try:
            check(case, np.random.default_rng(seed).normal(0, 2, V).astype(np.float32))
            compared += 1
        except TooCloseError:
            pass
    assert compared


@settings(max_examples=num_examples(150), suppress_health_check=[HealthCheck.filter_too_much])
@given(SEQUENCES, st.integers(0, 2**31))
def test_any_mixture(drawn, seed):
    case = made(drawn)
    try:
        case.params.check_model(V, 20, EOS)
        check(case, logits_of(seed, 1)[0])
    except (TooCloseError, ValueError):
        assume(False)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_p=0.9),
        SamplingParams(top_k=5, repetition_penalty=1.5),
        SamplingParams(min_p=0.1, logit_bias={4: 3.0}),
    ],
)
def test_draws_follow_the_distribution(params):
    rows, steps = WIDTH, 800
    logits = np.random.default_rng(5).normal(0, 1.5, V).astype(np.float32)
    state = admitted({s: Case(params, seed=s, prompt=(1, 2, 4)) for s in range(rows)})
    slots, live = np.arange(rows), np.ones(rows, np.bool_)

    def body(counted, _):
        # the state as at the start but for the number of tokens, so that penalties stay the same
        result, after = step(
            np.tile(logits, (rows, 1)),
            state_with(counted),
            slots,
            live,
            mode="full",
            num_logprobs=0,
        )
        return after.num_output, result.tokens

    def state_with(num_output):
        fields = {name: getattr(state, name) for name in type(state).__slots__}
        return type(state)(**{**fields, "num_output": num_output})

    _, tokens = jax.lax.scan(body, state.num_output, length=steps)
    expected = probabilities(logits, params, prompt=(1, 2, 4)) * rows * steps
    observed = np.bincount(np.asarray(tokens).ravel(), minlength=V)
    assert not observed[expected == 0].any()
    common = expected > 5
    rare = (expected > 0) & ~common
    f_obs, f_exp = list(observed[common]), list(expected[common])
    if rare.any():
        f_obs.append(observed[rare].sum())
        f_exp.append(expected[rare].sum())
    assert stats.chisquare(f_obs, f_exp).pvalue > 0.001
    # rows with different seeds and steps of one row do not repeat one another
    assert len({tuple(row) for row in np.asarray(tokens).T}) == rows


def test_seeds_use_all_64_bits():
    cases = {
        s: Case(SamplingParams(), seed)
        for s, seed in enumerate([0, 1, 1 << 32, 1 + (1 << 32), 1 << 63])
    }
    state, logits, drawn = admitted(cases), np.zeros((WIDTH, V), np.float32), []
    for _ in range(8):
        result, state = step(
            logits, state, np.arange(WIDTH), np.ones(WIDTH, np.bool_), mode="random", num_logprobs=0
        )
        drawn.append(np.asarray(result.tokens))
    assert len({tuple(row) for row in np.stack(drawn).T}) == WIDTH


def kept(x, top_k: list[int], top_p: list[float]) -> np.ndarray:
    rows = jnp.tile(x, (len(top_k), 1))
    off = jnp.zeros(len(top_k))
    return np.isfinite(jax.jit(truncate)(rows, jnp.array(top_k), jnp.array(top_p), off)).sum(-1)


@pytest.mark.thorough
def test_thresholds_over_a_large_vocabulary():
    x = np.random.default_rng(0).permutation(np.linspace(-30, 0, 2**18).astype(np.float32))
    assert len(np.unique(x)) == 2**18
    weight = np.exp(np.sort(x)[::-1].astype(np.float64))
    share = np.cumsum(weight) / weight.sum()
    found = kept(x, [1, 1000, 0, 2**18], [1.0, 1.0, 0.5, 0.999])
    assert list(found[:2]) == [1, 1000]
    np.testing.assert_allclose(found[2:], [1 + np.sum(share < q) for q in (0.5, 0.999)], rtol=1e-3)


def test_equal_logits_over_a_large_vocabulary_do_not_overflow():
    x = np.zeros(2**18, np.float32)
    x[: 2**17] = -1e-3
    assert list(kept(x, [0] * 4, [0.5, 0.500002, 0.1, 0.9])) == [2**17, 2**17, 2**17, 2**18]


def test_a_long_flat_tail_counts():
    x = np.full(2**18, np.log(1e-8), np.float32)  # 0.26 % of the probability, all together
    x[7] = 0
    assert list(kept(x, [0] * 4, [0.5, 0.997, 0.998, 0.999])) == [1, 1, 2**18, 2**18]


@pytest.mark.parametrize("word", [0, 1, 1000, 2**23 + 1, 2**31, 2**32 - 2**10, 2**32 - 1])
def test_noise_of_a_word_is_the_quantile_at_it(word):
    [noise] = gumbel_quantile(jnp.full(1, word, jnp.uint32))
    below = min((word + 0.5) / 2**32, 1 - 2**-24)  # of the largest words nothing is infinite
    assert noise == pytest.approx(-np.log(-np.log1p(-below)), rel=1e-4)


@pytest.mark.parametrize("argmax", [None, first_largest])
@pytest.mark.parametrize("V", [1, 2, 61, 128])
def test_a_draw_is_the_argmax_of_scores_and_noise(V, argmax):
    """Drawn rows, and greedy rows with many equal logits."""
    B, rng = 64, np.random.default_rng(V)
    keys, drawn = jax.random.split(jax.random.key(3), B), np.arange(B) % 3 > 0
    x = rng.integers(0, 4, (B, V)).astype(np.float32)
    noise = jax.vmap(gumbel_noise, in_axes=(0, None))(keys, V)
    want = np.where(drawn[:, None], x / 2 + noise, x).argmax(1)
    found = jax.jit(functools.partial(gumbel_argmax, argmax=argmax))(x, x / 2, keys, drawn)
    np.testing.assert_array_equal(found, want)


def test_the_noise_of_tokens_and_pairs_is_independent():
    keys = jax.random.split(jax.random.key(5), 4096)
    noise = np.asarray(jax.vmap(gumbel_noise, in_axes=(0, None))(keys, 8))
    # Their means vary by 0.02 and their correlations by 0.016.
    np.testing.assert_allclose(noise.mean(0), np.euler_gamma, atol=0.1)
    np.testing.assert_allclose(noise.var(0), np.pi**2 / 6, atol=0.25)
    np.testing.assert_allclose(np.corrcoef(noise.T), np.eye(8), atol=0.08)
