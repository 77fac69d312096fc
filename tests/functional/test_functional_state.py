"""The single steps: prefill in chunks, fork, decode in a loop of the caller's, no room left."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax import functional
from rjax.errors import InvalidConfigError
from rjax.pallas_kernels.attention.plan.device import plan_on_device
from tests.functional import families
from tests.functional.programs import dense_logprobs, prepared, prompts


def empty(setup, batch, pages):
    return functional.make_state(setup, batch=batch, num_pages=pages, dtype=jnp.float32)


prefill = jax.jit(functional.prefill, static_argnums=0)
decode = jax.jit(functional.decode, static_argnums=0)
fork = jax.jit(functional.fork, static_argnums=0)


def logprobs_after(setup, weights, tokens):
    """Of a list of sequences, by a plain forward pass each."""
    found = []
    for row in tokens:
        padded = jnp.asarray([list(row) + [0] * (64 - len(row))])
        found.append(np.asarray(dense_logprobs(setup.graph, weights, padded))[0, len(row) - 1])
    return np.stack(found)


def test_pools_of_a_new_state_are_not_equal():
    """XLA may give equal constants of a program one buffer, and a kernel writes both pools."""
    setup, _ = prepared()
    state = empty(setup, 2, 4)
    for k_pages, v_pages in zip(state.k_pages, state.v_pages, strict=True):
        assert (k_pages != v_pages).all()
    for layer in empty(families.prepared(families.HYBRIDS[0])[0], 2, 4).states:
        for one, other in itertools.combinations(dataclasses.astuple(layer), 2):
            assert one.shape != other.shape or (one != other).all()


def test_a_prompt_in_chunks_equals_a_plain_forward_pass():
    setup, weights = prepared()
    tokens, lengths = prompts(3)
    state, at = empty(setup, 3, 20), np.zeros(3, int)
    while (at < lengths).any():
        chunk = np.zeros((3, 11), np.int32)
        counts = np.minimum(11, np.asarray(lengths) - at).astype(np.int32)
        counts[1] = min(counts[1], 3)  # rows go on at different speeds
        for b in range(3):
            chunk[b, : counts[b]] = tokens[b, at[b] : at[b] + counts[b]]
        state, logits = prefill(setup, weights, state, jnp.asarray(chunk), jnp.asarray(counts))
        at += counts
        if (counts > 0).all():
            want = logprobs_after(
                setup, weights, [np.asarray(tokens[b, : at[b]]).tolist() for b in range(3)]
            )
            np.testing.assert_allclose(jax.nn.log_softmax(logits), want, atol=2e-5)
    np.testing.assert_array_equal(state.lengths, lengths)


def test_a_jitted_while_loop_decodes_greedily_as_plain_forward_passes_do():
    setup, weights = prepared()
    tokens, lengths = prompts(2)
    new = 9

    @jax.jit
    def program(weights, tokens, lengths):
        state = empty(setup, 2, 20)
        state, logits = functional.prefill(setup, weights, state, tokens, lengths)

        def body(carry):
            i, state, logits, out = carry
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            state, logits = functional.decode(setup, weights, state, token)
            return i + 1, state, logits, out.at[:, i].set(token)

        start = jnp.zeros((), jnp.int32), state, logits, jnp.zeros((2, new), jnp.int32)
        return jax.lax.while_loop(lambda carry: carry[0] < new, body, start)[3]

    out = np.asarray(program(weights, tokens, lengths))
    for b in range(2):
        row = np.asarray(tokens[b, : lengths[b]]).tolist()
        for token in out[b]:
            assert logprobs_after(setup, weights, [row])[0].argmax() == token
            row.append(int(token))


@pytest.mark.thorough
def test_forks_of_forks_go_their_own_ways():
    setup, weights = prepared()
    tokens, lengths = prompts(2, longest=21)
    state, _ = prefill(setup, weights, empty(setup, 2, 40), tokens, lengths)
    rows = [np.asarray(tokens[b, : lengths[b]]).tolist() for b in range(2)]
    rng = np.random.default_rng(0)
    for parents in ([0, 0, 1, 1, 1], [0, 1, 1, 4, 4, 2], [5, 0, 0]):
        state = fork(setup, state, jnp.asarray(parents))
        rows = [list(rows[p]) for p in parents]
        for _ in range(5):
            token = rng.integers(0, 61, len(rows)).astype(np.int32)
            state, logits = decode(setup, weights, state, jnp.asarray(token))
            rows = [[*row, int(t)] for row, t in zip(rows, token, strict=True)]
        want = logprobs_after(setup, weights, rows)
        np.testing.assert_allclose(jax.nn.log_softmax(logits), want, atol=2e-5)


@pytest.mark.thorough
def test_the_samples_of_a_prompt_read_its_pages_once():
    setup, weights = prepared()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 61, (2, 40)), jnp.int32)
    lengths = jnp.asarray([40, 33], jnp.int32)
    state, _ = prefill(setup, weights, empty(setup, 2, 40), tokens, lengths)
    used = int(state.pages_used)
    state = fork(setup, state, jnp.repeat(jnp.arange(2), 16))
    assert int(state.pages_used) == used + 16  # prompt 0 fills its pages; prompt 1 leaves one open
    plan = plan_on_device(
        state.page_table,
        jnp.ones(32, jnp.int32),
        state.lengths,
        page_size=8,
        shape=setup.plan_shape(32, 32),
        sharing="on",
    )
    read = sum(int(jnp.sum(items.kv_stop - items.kv_start)) for items in plan.lists)
    assert read == 2 * 32 + 16 * (8 + 1)


@pytest.mark.thorough
def test_a_row_without_room_says_so_and_harms_no_other():
    setup, weights = prepared()
    tokens, _ = prompts(3, longest=16)
    state, logits = prefill(setup, weights, empty(setup, 3, 5), tokens, jnp.asarray([16, 16, 8]))
    assert np.isfinite(logits).all()
    state, logits = decode(setup, weights, state, tokens[:, 0])  # each needs a page
    assert np.isnan(logits).all()
    np.testing.assert_array_equal(state.lengths, [16, 16, 8])
    state = empty(setup, 2, 12)
    state, _ = prefill(setup, weights, state, tokens[:2], jnp.asarray([16, 12]))
    for _ in range(3):
        state, _ = prefill(setup, weights, state, tokens[:2], jnp.asarray([16, 0]))
    state, logits = decode(setup, weights, state, tokens[:2, 0])
    assert np.isnan(logits[0]).all()  # row 0 is at max_context
    assert np.isfinite(logits[1]).all()
    np.testing.assert_array_equal(state.lengths, [64, 13])


@pytest.mark.thorough
def test_a_fork_without_room_says_so():
    setup, weights = prepared()
    tokens, _ = prompts(1, longest=12)
    state, _ = prefill(setup, weights, empty(setup, 1, 4), tokens, jnp.asarray([12]))
    state = fork(setup, state, jnp.zeros(3, jnp.int32))
    _, logits = decode(setup, weights, state, tokens[0, :3])
    assert np.isfinite(logits[:2]).all()
    assert np.isnan(logits[2]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1000}, "max_context is 1000"),
        ({"kv_split_size": 12}, "kv_split_size is 12"),
        ({"relay": "perhaps"}, "relay is 'perhaps'"),
        ({"page_size": 0}, "page_size is 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(InvalidConfigError, match=message):
        prepared(**options)
