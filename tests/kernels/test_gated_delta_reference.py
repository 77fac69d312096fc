"""The gated delta rule in plain JAX: it is the recurrence, in whatever steps the tokens come."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.pallas_kernels.gated_delta.base import causal_conv, gated_delta
from rjax.pallas_kernels.gated_delta.states import NO_PAGE
from tests.kernels.gated_delta_steps import (
    Part,
    Sizes,
    convolution,
    empty_states,
    random_tokens,
    recurrence,
    stacked,
    state_rows,
)
from tests.properties import num_examples

SIZES = Sizes()
ROWS, SEQS, LENGTHS = 40, 3, (29, 40, 7)
_delta, _conv = jax.jit(gated_delta), jax.jit(causal_conv)


@functools.cache
def _tokens():
    return [random_tokens(SIZES, n, seed) for seed, n in enumerate(LENGTHS)]


@functools.cache
def _inputs():
    rng = np.random.default_rng(7)
    shapes = [(n, SIZES.K, SIZES.mixed_dim) for n in LENGTHS]
    weight = rng.normal(size=(SIZES.K, SIZES.taps, SIZES.mixed_dim))
    return [jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes], jnp.asarray(weight)


def _pages(number: int) -> list[int]:
    return [number * 5 + page for page in range(5)]


def _run(cuts: list[list[int]]):
    """(outputs, convolutions, states) of all sequences, of which step i computes up to cuts[i]."""
    layer, done = empty_states(SIZES, 16, SEQS + 1), [0] * SEQS
    inputs, weight = _inputs()
    outputs, convolved = [[] for _ in range(SEQS)], [[] for _ in range(SEQS)]
    for stops in cuts:
        numbers = [n for n in range(SEQS) if stops[n] > done[n]]
        parts = [Part(n, done[n], stops[n], _pages(n)) for n in numbers]
        if not parts:
            continue
        rows = state_rows(parts, SIZES.S, rows=ROWS * 2, seqs=SEQS)
        tokens = stacked(parts, [_tokens()[n] for n in numbers], ROWS * 2)
        x = stacked(parts, [inputs[n] for n in numbers], ROWS * 2)
        conv, layer = _conv(x, weight, layer, rows)
        out, layer = _delta(*tokens, layer, rows)
        for b, (n, part) in enumerate(zip(numbers, parts, strict=True)):
            mine = np.asarray(rows.sequence) == b
            outputs[n].append(np.asarray(out)[mine])
            convolved[n].append(np.asarray(conv)[mine])
            done[n] = part.stop
    return [np.concatenate(o) for o in outputs], [np.concatenate(c) for c in convolved], layer


@functools.cache
def _whole():
    return _run([list(LENGTHS)])


def test_it_is_the_recurrence():
    outputs, convolved, layer = _whole()
    inputs, weight = _inputs()
    for n, length in enumerate(LENGTHS):
        expected, _ = recurrence(*_tokens()[n])
        np.testing.assert_allclose(outputs[n], expected, atol=2e-6)
        np.testing.assert_allclose(convolved[n], convolution(inputs[n], weight), atol=2e-6)
        for page in range(length // SIZES.S):
            stop = (page + 1) * SIZES.S
            _, state = recurrence(*[x[:stop] for x in _tokens()[n]])
            np.testing.assert_allclose(layer.states[_pages(n)[page]], state, atol=2e-6)
            np.testing.assert_array_equal(
                layer.conv_ends[_pages(n)[page]], inputs[n][stop - SIZES.taps + 1 : stop]
            )


@hypothesis.given(
    st.lists(st.tuples(*[st.integers(0, n) for n in LENGTHS]), min_size=1, max_size=6)
)
@hypothesis.settings(max_examples=num_examples(25))
def test_steps_change_no_bit(cuts):
    """Tokens in any steps, one by one too, give the bits of all at once: outputs and states."""
    ascending = [
        list(column) for column in zip(*[sorted(c) for c in zip(*cuts, strict=True)], strict=True)
    ]
    outputs, convolved, layer = _run([*ascending, list(LENGTHS)])
    expected, expected_conv, expected_layer = _whole()
    for n in range(SEQS):
        np.testing.assert_array_equal(outputs[n], expected[n])
        np.testing.assert_array_equal(convolved[n], expected_conv[n])
        for page in _pages(n)[: LENGTHS[n] // SIZES.S]:
            np.testing.assert_array_equal(layer.states[page], expected_layer.states[page])
            np.testing.assert_array_equal(layer.conv_ends[page], expected_layer.conv_ends[page])


def test_decode_steps_change_no_bit():
    outputs, convolved, layer = _run([[min(i, n) for n in LENGTHS] for i in range(1, 41)])
    expected, expected_conv, expected_layer = _whole()
    jax.tree.map(np.testing.assert_array_equal, (outputs, convolved), (expected, expected_conv))
    np.testing.assert_array_equal(layer.states, expected_layer.states)


def test_a_cached_state_serves_another_sequence():
    """A sequence that begins behind cached pages computes what it would from its first token."""
    expected, expected_conv, layer = _whole()
    inputs, weight = _inputs()
    start = 2 * SIZES.S
    part = Part(SEQS, start, 29, [NO_PAGE, _pages(0)[1], 15, NO_PAGE])
    rows = state_rows([part], SIZES.S, rows=ROWS, seqs=SEQS)
    conv, layer = _conv(stacked([part], [inputs[0]], ROWS), weight, layer, rows)
    out, after = _delta(*stacked([part], [_tokens()[0]], ROWS), layer, rows)
    np.testing.assert_array_equal(out[: 29 - start], expected[0][start:])
    np.testing.assert_array_equal(conv[: 29 - start], expected_conv[0][start:])
    np.testing.assert_array_equal(after.states[15], layer.states[_pages(0)[2]])
    np.testing.assert_array_equal(after.states[:15], layer.states[:15])


def test_updates_give_the_outputs():
    """The stored updates of a tail are those by which a decode step attends."""
    _, _, layer = _whole()
    q, k, v, decay, beta = _tokens()[0]
    start, last = 24, 28
    total = np.cumsum(np.asarray(decay[start : last + 1], np.float64), 0)
    left = np.exp(total[-1] - total)  # [tokens, K, G]
    state = np.asarray(layer.states[_pages(0)[2]], np.float64) * np.exp(total[-1])[..., None, None]
    keys = np.asarray(layer.keys[0, :, : last + 1 - start], np.float64)
    updates = np.asarray(layer.updates[0, :, :, : last + 1 - start], np.float64)
    state = state + np.einsum("tkg,kth,kgty->kghy", left, keys, updates)
    out = np.einsum("kghy,kh->kgy", state, np.asarray(q[last])) * SIZES.H**-0.5
    np.testing.assert_allclose(out, recurrence(q, k, v, decay, beta)[0][last], atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits(dtype):
    tokens = random_tokens(SIZES, 29, 3, dtype)
    part = Part(0, 0, 29, _pages(0))
    rows = state_rows([part], SIZES.S, rows=29, seqs=1)
    out, layer = _delta(*tokens, empty_states(SIZES, 16, 1, dtype), rows)
    expected, _ = recurrence(*tokens)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=2e-2)
    _, state = recurrence(*[x[:24] for x in tokens])
    np.testing.assert_allclose(layer.states[2], state, atol=1e-5)
