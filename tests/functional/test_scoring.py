"""Log-likelihoods with gradients, several end tokens, and the example of the module's docstring."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax import functional
from tests.functional.programs import dense_logprobs, prepared, prompts


@pytest.mark.slow
def test_the_example_of_the_docstring_runs():
    found = doctest.testmod(functional, raise_on_error=True)
    assert found.attempted >= 15


@pytest.mark.thorough
def test_logprobs_are_those_of_a_forward_pass_and_have_their_gradient():
    setup, weights = prepared()
    tokens = prompts(2, longest=9)[0]
    found = jax.jit(functional.token_logprobs, static_argnums=0)(setup, weights, tokens)
    every = dense_logprobs(setup.graph, weights, tokens)[:, :-1]
    want = np.take_along_axis(np.asarray(every), np.asarray(tokens)[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(found, want, atol=2e-5)

    def total(scale):
        scaled = jax.tree.map(lambda leaf: leaf * scale, weights)
        return jnp.sum(functional.token_logprobs(setup, scaled, tokens))

    total = jax.jit(total)
    slope = jax.jit(jax.grad(total))(1.0)
    np.testing.assert_allclose(slope, (total(1.001) - total(0.999)) / 0.002, rtol=2e-2)


@pytest.mark.thorough
def test_each_of_several_end_tokens_ends_a_sample():
    setup, weights = prepared(relay="off")
    tokens, lengths = prompts(2)
    keys = jax.random.split(jax.random.key(1), 2)
    run = jax.jit(functools.partial(functional.rollout, setup, samples=8, max_new_tokens=10))

    def sampled(ends):
        return np.asarray(run(weights, tokens, lengths, keys, end_token=jnp.asarray(ends)).tokens)

    free = sampled([-1, -1, -1])
    assert (free >= 0).all()
    ends = [int(free[0, 0, 3]), int(free[1, 5, 2]), -1]
    for row, ended in zip(free.reshape(16, -1), sampled(ends).reshape(16, -1), strict=True):
        at = np.flatnonzero(np.isin(row, ends))
        length = at[0] + 1 if at.size else row.size
        np.testing.assert_array_equal(ended[:length], row[:length])
        assert (ended[length:] == -1).all()
