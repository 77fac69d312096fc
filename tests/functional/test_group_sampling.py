"""Group sampling: 64 samples for each of 8 prompts, as a reinforcement-learning trainer does it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rjax import functional
from rjax.pallas_kernels.attention.plan.splits import SplitPolicy
from tests.functional.programs import VOCAB, prepared, prompts, scored, tiny_model

PROMPTS, SAMPLES, NEW = 8, 64, 12


@functools.cache
def program(relay):
    """The setup, its weights, and the jitted rollout, compiled once for all tests."""
    setup, weights = prepared(relay=relay)
    run = functools.partial(
        functional.rollout, setup, samples=SAMPLES, max_new_tokens=NEW, end_token=7
    )
    return setup, weights, jax.jit(run)


def keys(seed):
    return jax.random.split(jax.random.key(seed), PROMPTS)


@functools.cache
def rolled(relay):
    _, weights, run = program(relay)
    return jax.tree.map(np.asarray, run(weights, *prompts(PROMPTS), keys(1)))


@pytest.mark.thorough
def test_log_probabilities_equal_a_plain_forward_pass():
    setup, weights, _ = program("on")
    tokens, lengths = prompts(PROMPTS)
    out = rolled("on")
    assert out.tokens.shape == (PROMPTS, SAMPLES, NEW)
    for a in range(PROMPTS):
        want = scored(setup, weights, tokens[a], int(lengths[a]), out.tokens[a])
        live = out.tokens[a] >= 0
        np.testing.assert_allclose(out.logprobs[a][live], want[live], atol=2e-5)
        assert not out.logprobs[a][~live].any()


@pytest.mark.thorough
def test_samples_end_at_the_end_token_and_differ():
    out = rolled("on")
    ended = 0
    for tokens, length in zip(out.tokens.reshape(-1, NEW), out.lengths.reshape(-1), strict=True):
        assert (tokens[:length] >= 0).all()
        assert (tokens[length:] == -1).all()
        assert 7 not in tokens[: length - 1]
        assert length == NEW or tokens[length - 1] == 7
        ended += length < NEW
    assert ended > 0
    assert len({row.tobytes() for row in out.tokens.reshape(-1, NEW)}) > PROMPTS * SAMPLES / 2


@pytest.mark.sample(1, 0)
@pytest.mark.parametrize("relay", ["off", "auto"])
def test_relay_changes_no_token(relay):
    on, other = rolled("on"), rolled(relay)
    np.testing.assert_array_equal(on.tokens, other.tokens)
    np.testing.assert_allclose(on.logprobs, other.logprobs, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("relay", ["on", "off"])
def test_long_splits_of_prompts_change_no_token(relay):
    """As on a GPU, where a prompt's KV is split more coarsely than that of samples."""
    setup, weights = prepared(relay=relay, kv_split_size=8)
    coarse = dataclasses.replace(setup.backend.tuning, split_policy=SplitPolicy(1, 1, 8))
    setup = dataclasses.replace(setup, backend=dataclasses.replace(setup.backend, tuning=coarse))
    assert setup.plan_shape(512, 512, prefixes=True).prefix_split_size == 32
    run = functools.partial(
        functional.rollout, setup, samples=SAMPLES, max_new_tokens=NEW, end_token=7
    )
    found = jax.jit(run)(weights, *prompts(PROMPTS), keys(1))
    np.testing.assert_array_equal(found.tokens, rolled("on").tokens)
    np.testing.assert_allclose(found.logprobs, rolled("on").logprobs, atol=1e-5)


@pytest.mark.thorough
def test_samples_follow_the_model_s_chances():
    setup, weights, run = program("on")
    tokens, lengths = prompts(1)
    alike = jnp.repeat(tokens, PROMPTS, 0), jnp.repeat(lengths, PROMPTS)
    first = np.asarray(run(weights, *alike, keys(5)).tokens[:, :, 0])
    every = np.arange(VOCAB)[:, None]
    chances = np.exp(scored(setup, weights, tokens[0], int(lengths[0]), every)[:, 0])
    assert first.size == 512
    seen = np.bincount(first.ravel(), minlength=VOCAB) / 512
    assert np.abs(seen - chances).max() < 0.08


@pytest.mark.thorough
def test_a_trainer_samples_its_current_weights_without_a_recompile():
    setup, _, run = program("on")
    model = tiny_model()
    tokens, lengths = prompts(PROMPTS)
    first = run(nnx.split(model)[1], tokens, lengths, keys(0))
    model.embedding.weight[...] = model.embedding.weight[...] * 1.5  # a step of training
    weights = nnx.split(model)[1]
    second = run(weights, tokens, lengths, keys(0))
    assert run._cache_size() == 1
    assert not np.allclose(first.logprobs, second.logprobs)
    sampled = np.asarray(second.tokens[1])
    want, live = scored(setup, weights, tokens[1], int(lengths[1]), sampled), sampled >= 0
    assert live.any(axis=0).all()
    np.testing.assert_allclose(second.logprobs[1][live], want[live], atol=2e-5)


def test_too_long_a_rollout_is_refused():
    setup, weights = prepared()
    tokens, lengths = prompts(2)
    with pytest.raises(ValueError, match="max_context"):
        functional.rollout(
            setup, weights, tokens, lengths, keys(0)[:2], samples=2, max_new_tokens=30
        )


@pytest.mark.thorough
def test_greedy_takes_the_likeliest():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, VOCAB)), jnp.float32)
    found = functional.sample(logits, keys(0)[:4], temperature=0.0, top_k=3)
    np.testing.assert_array_equal(found.tokens, logits.argmax(-1))
    one = functional.sample(logits, keys(0)[:4], temperature=5.0, top_k=1)
    np.testing.assert_array_equal(one.tokens, logits.argmax(-1))
