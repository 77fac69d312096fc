"""Models whose layers differ: rollouts say what plain forward passes and engines say."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from rjax import functional
from rjax.sampling import SamplingParams
from tests.engine.tiny import make_engine, run
from tests.functional.families import (
    GEMMA_4,
    HYBRIDS,
    LENGTH,
    MODELS,
    NEW,
    TOLERANCE,
    model,
    prepared,
    prompts,
    rolled,
)
from tests.functional.programs import dense_logprobs, scored

EACH = (GEMMA_4[0], HYBRIDS[0])
# Few rows, one slot for the states of prompts, and so few pages that samples are preempted which
# find the state of their prompt gone.
SCARCE: dict[str, Any] = {"rows": 5, "num_pages": 9, "max_num_batched_tokens": 24}
prefill = jax.jit(functional.prefill, static_argnums=0)
decode = jax.jit(functional.decode, static_argnums=0)
fork = jax.jit(functional.fork, static_argnums=0)


def check_against_plain_passes(name, out):
    setup, weights = prepared(name)
    tokens, lengths = prompts()
    for a in range(len(lengths)):
        want = scored(setup, weights, tokens[a], int(lengths[a]), out.tokens[a])
        np.testing.assert_allclose(out.logprobs[a], want, atol=TOLERANCE)


def each_family():
    """Two in a default run. Those with experts compile for long."""
    for name in (*GEMMA_4, *HYBRIDS):
        marks = pytest.mark.slow if "moe" in name else pytest.mark.thorough
        yield pytest.param(name, marks=() if name in EACH else marks)


@pytest.mark.parametrize("name", [*each_family()])
def test_rows_that_are_refilled_say_what_plain_forward_passes_do(name):
    check_against_plain_passes(name, rolled(name, **SCARCE))


@pytest.mark.thorough
@pytest.mark.parametrize("name", EACH)
def test_all_at_once_without_relay_or_alone_the_tokens_are_the_same(name):
    want = rolled(name, tail_rows=(2,), **SCARCE)
    for relay in ("on", "off"):
        found = rolled(name, relay=relay)
        np.testing.assert_array_equal(found.tokens, want.tokens)
        np.testing.assert_allclose(found.logprobs, want.logprobs, atol=TOLERANCE)
    for prompt in (1, 2):
        alone = rolled(name, slice(prompt, prompt + 1))
        np.testing.assert_array_equal(alone.tokens[0], want.tokens[prompt])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EACH[::-1])
def test_chunks_and_forks_of_forks_say_what_plain_forward_passes_do(name):
    setup, weights = prepared(name)
    tokens, lengths = prompts()
    rows = [np.asarray(tokens[b, : lengths[b]]).tolist() for b in range(4)]
    state = functional.make_state(setup, batch=4, num_pages=40, dtype=jnp.float32)
    at = np.zeros(4, int)
    while (at < np.asarray(lengths)).any():
        counts = np.minimum([11, 5, 11, 3], np.asarray(lengths) - at).astype(np.int32)
        chunk = np.zeros((4, 11), np.int32)
        for b in range(4):
            chunk[b, : counts[b]] = rows[b][at[b] : at[b] + counts[b]]
        state, _ = prefill(setup, weights, state, jnp.asarray(chunk), jnp.asarray(counts))
        at += counts
    rng = np.random.default_rng(0)
    for parents in ([0, 0, 1, 1, 2, 3], [5, 0, 1, 1, 4, 2]):
        state = fork(setup, state, jnp.asarray(parents))
        rows, drawn = [list(rows[p]) for p in parents], [[] for _ in parents]
        for step in range(9):
            token = rng.integers(3, 60, len(rows)).astype(np.int32)
            live = np.arange(len(rows)) != step % 7  # a row that waits is left alone
            state, logits = decode(setup, weights, state, jnp.asarray(token), jnp.asarray(live))
            for b in np.flatnonzero(live):
                rows[b].append(int(token[b]))
                drawn[b].append(np.asarray(jax.nn.log_softmax(logits[b])))
        padded = jnp.asarray([row + [0] * (LENGTH - len(row)) for row in rows])
        every = np.asarray(dense_logprobs(setup.graph, weights, padded))
        for b, found in enumerate(drawn):
            want = every[b, len(rows[b]) - len(found) : len(rows[b])]
            np.testing.assert_allclose(found, want, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EACH)
def test_greedy_samples_are_those_of_an_engine(name):
    out = rolled(name, temperature=0.0)
    engine = make_engine(
        MODELS / name, load_format="auto", dtype="float32", max_model_len=LENGTH, num_pages=96
    )
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=1)
    tokens, lengths = prompts()
    asked = [np.asarray(tokens[a, : lengths[a]]).tolist() for a in range(4)]
    done = run(engine, [(str(a), prompt, params) for a, prompt in enumerate(asked)])
    engine.close()
    for a in range(4):
        [said] = done[str(a)].outputs
        chosen = [
            at[token].logprob for at, token in zip(said.logprobs, said.token_ids, strict=True)
        ]
        for sample in range(len(out.tokens[a])):
            assert out.tokens[a, sample].tolist() == list(said.token_ids)
            np.testing.assert_allclose(out.logprobs[a, sample], chosen, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EACH)
def test_log_likelihoods_have_their_gradient(name):
    setup, weights = prepared(name)
    tokens = prompts()[0][:2, :9]

    def total(scale):
        scaled = jax.tree.map(lambda leaf: leaf * scale, weights)
        return jnp.sum(functional.token_logprobs(setup, scaled, tokens))

    total = jax.jit(total)
    slope = jax.jit(jax.grad(total))(1.0)
    step = 2.5e-4  # float32 leaves little room between rounding and curvature
    np.testing.assert_allclose(slope, (total(1 + step) - total(1 - step)) / (2 * step), rtol=3e-2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", EACH)
def test_the_tensors_of_a_checkpoint_fuse_to_the_loaded_weights(name):
    setup, want = functional.prepare(model(name), max_context=LENGTH, page_size=8)
    tensors = load_file(MODELS / name / "model.safetensors")
    found = jax.jit(functools.partial(functional.fuse_weights, setup))(tensors)
    for got, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert got.dtype == leaf.dtype
        np.testing.assert_array_equal(got, leaf)
