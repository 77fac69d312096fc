"""A sequence's tokens depend on that sequence alone: not on slot, batch or who came before."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import (
    EOS,
    EVERYTHING,
    REQUESTS,
    SEQUENCES,
    SLOTS,
    WIDTH,
    Case,
    V,
    admitted,
    donating_step,
    logits_of,
    made,
    step,
)

from rjax.errors import InvalidRequestError
from rjax.sampling import (
    ADMISSIONS,
    SamplingParams,
    SamplingState,
    admit,
    init_state,
    lower_admission,
    slot_row,
)
from rjax.sampling.state import SlotRow
from tests.properties import num_examples

STEPS = 6
MODES = ("greedy", "random", "full")


def bits(tree, slot=None) -> list[bytes]:
    pick = (lambda x: x) if slot is None else (lambda x: x[slot])
    return [np.asarray(pick(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def run_alone(case: Case, logits: np.ndarray, mode="full", num_steps=STEPS) -> list[int]:
    """Tokens of one sequence, its step t seeing logits[t]."""
    state, tokens = admitted({0: case}), []
    for t in range(num_steps):
        result, state = step(
            logits[t][None], state, np.array([0]), np.array([True]), mode=mode, num_logprobs=0
        )
        tokens.append(int(result.tokens[0]))
    return tokens


@settings(max_examples=num_examples(25))
@given(st.lists(SEQUENCES, min_size=2, max_size=4), st.integers(0, 2**31), st.randoms())
def test_tokens_are_the_same_alone_and_in_any_batch(drawn, seed, random):
    cases = [made(one) for one in drawn]
    logits = [logits_of(seed + i, STEPS) for i in range(len(cases))]
    alone = [run_alone(case, table) for case, table in zip(cases, logits, strict=True)]

    slot_of = random.sample(range(SLOTS), len(cases))
    state = admitted(dict(zip(slot_of, cases, strict=True)))
    done, together = [0] * len(cases), [[] for _ in cases]
    while min(done) < STEPS:
        # some of the unfinished sequences, in any order, among rows that are not live
        waiting = [i for i in range(len(cases)) if done[i] < STEPS]
        chosen = random.sample(waiting, random.randint(1, len(waiting)))
        rows = random.sample([*chosen, *[None] * (WIDTH - len(chosen))], WIDTH)
        slots = [random.choice([-1, 0, 1, 99]) if i is None else slot_of[i] for i in rows]
        live = np.array([i is not None for i in rows])
        x = np.full((WIDTH, V), np.nan, np.float32)
        for b, i in enumerate(rows):
            if i is not None:
                x[b] = logits[i][done[i]]
        result, state = donating_step(x, state, np.array(slots), live, mode="full", num_logprobs=0)
        for b, i in enumerate(rows):
            if i is None:
                assert int(result.tokens[b]) == -1
            else:
                together[i].append(int(result.tokens[b]))
                done[i] += 1
    assert together == alone


@settings(max_examples=num_examples(25))
@given(SEQUENCES, st.integers(0, 2**31), st.integers(0, STEPS))
def test_resumed_sequence_goes_on_the_same(drawn, seed, cut):
    case = made(drawn)
    logits = logits_of(seed, STEPS)
    whole = run_alone(case, logits)
    resumed = dataclasses.replace(case, output=(*case.output, *whole[:cut]))
    assert run_alone(resumed, logits[cut:], num_steps=STEPS - cut) == whole[cut:]


def test_resumed_row_equals_the_state_that_was_left():
    case = Case(EVERYTHING, seed=2**40 + 3, prompt=(1, 2, 3))
    state, tokens = admitted({0: case}), []
    for logits in logits_of(0, STEPS):
        result, state = step(
            logits[None], state, np.array([0]), np.array([True]), mode="full", num_logprobs=0
        )
        tokens.append(int(result.tokens[0]))
    assert bits(state, 0) == bits(case.row(tokens))


def test_a_row_holds_every_field_of_the_state():
    names = [field.name for field in dataclasses.fields(SamplingState)]
    assert [field.name for field in dataclasses.fields(SlotRow)] == names


@settings(max_examples=num_examples(25))
@given(REQUESTS, st.integers(0, 2**64 - 1))
def test_nothing_of_a_former_sequence_is_left(options, seed):
    state = admitted({s: Case(EVERYTHING, 9, prompt=(1, 2, 3)) for s in range(SLOTS)})
    for logits in logits_of(1, 4):
        _, state = donating_step(
            np.tile(logits, (WIDTH, 1)),
            state,
            np.arange(WIDTH),
            np.ones(WIDTH, np.bool_),
            mode="full",
            num_logprobs=0,
        )
    used = bits(state, 0), bits(state, 2)
    fresh = Case(SamplingParams(**options), seed, prompt=(8,))
    state = admit(state, {1: fresh.row()})
    assert bits(state, 1) == bits(admitted({1: fresh}), 1)
    assert (bits(state, 0), bits(state, 2)) == used


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 128])
def test_without_allowed_ids_all_are_allowed(vocab_size):
    row = slot_row(
        SamplingParams(),
        seed=0,
        prompt_token_ids=(),
        output_token_ids=(),
        eos_token_ids=(),
        vocab_size=vocab_size,
    )
    bits = np.unpackbits(row.allowed.view(np.uint8), bitorder="little")
    assert bits.sum() == bits[:vocab_size].sum() == vocab_size


@settings(max_examples=num_examples(25))
@given(st.dictionaries(st.integers(0, 39), SEQUENCES, max_size=40))
def test_several_are_admitted_as_each_alone(drawn):
    rows = {slot: made(one).row() for slot, one in drawn.items()}
    together, alone = admit(init_state(40, V), rows), init_state(40, V)
    for slot, row in rows.items():
        alone = admit(alone, {slot: row})
    assert bits(together) == bits(alone)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_lowered_admission_is_what_admit_runs(admission):
    """Compiled ahead, ``admit`` compiles nothing."""
    state = init_state(SLOTS + 2, V)  # a size of its own
    lower_admission(state, V, admission).compile()
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        listen := lambda event, duration_secs, **_: found.append(event)
    )
    row = Case(EVERYTHING, output=(3,) if admission == "continued" else ()).row()
    admit(state, dict.fromkeys(range(SLOTS if admission == "several" else 1), row))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert not [event for event in found if event.endswith("backend_compile_duration")]


def test_admit_donates_the_state():
    state = init_state(2, V)
    admit(state, {0: Case(EVERYTHING).row()})
    assert state.output_counts.is_deleted()


@pytest.mark.parametrize("slot", [-1, 2])
def test_admit_to_a_slot_that_does_not_exist(slot):
    with pytest.raises(AssertionError, match="are not all of 2"):
        admit(init_state(2, V), {1: Case(EVERYTHING).row(), slot: Case(EVERYTHING).row()})


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_not_live_change_nothing(mode):
    state = admitted({s: Case(EVERYTHING, s) for s in range(SLOTS)})
    before = bits(state)
    result, state = step(
        np.full((WIDTH, V), np.nan, np.float32),
        state,
        np.array([0, 0, -1, SLOTS, 2**31 - 1]),
        np.zeros(WIDTH, np.bool_),
        mode=mode,
        num_logprobs=3,
    )
    assert bits(state) == before
    assert list(result.tokens) == [-1] * WIDTH
    assert list(result.rank) == [0] * WIDTH


def test_counts_advance():
    state = init_state(SLOTS, V)
    slots, live = np.array([2, 0, 0, 0, 4]), np.array([1, 0, 0, 0, 1], np.bool_)
    for mode in MODES:
        _, state = step(
            logits_of(0, WIDTH),
            state,
            slots,
            live,
            mode=mode,
            num_logprobs=0,
        )
    assert list(state.num_output) == [0, 0, 3, 0, 3, 0]
    # only the full step counts tokens
    assert list(np.asarray(state.output_counts).sum(-1)) == [
        0,
        0,
        1,
        0,
        1,
        0,
    ]


def test_modes_agree_where_several_serve():
    logits = logits_of(3, STEPS)
    greedy = Case(SamplingParams(temperature=0.0))
    expected = [int(np.argmax(row)) for row in logits]
    assert [run_alone(greedy, logits, mode) for mode in MODES] == [expected] * 3
    warm = Case(SamplingParams(temperature=0.8), seed=4)
    assert run_alone(warm, logits, "random") == run_alone(warm, logits, "full")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("filling", [np.nan, -np.inf, np.inf, 3e38, -3e38, 0.0])
def test_wild_logits_give_ids_of_the_vocabulary(mode, filling):
    logits = np.full((WIDTH, V), filling, np.float32)
    logits[1, ::2], logits[2, 3] = 1.0, -np.inf
    cases = {s: Case(EVERYTHING, s, prompt=(1, 2), output=(3,)) for s in range(WIDTH)}
    result, _ = step(
        logits,
        admitted(cases),
        np.arange(WIDTH),
        np.ones(WIDTH, np.bool_),
        mode=mode,
        num_logprobs=3,
    )
    tokens = np.asarray(result.tokens)
    assert ((tokens >= 0) & (tokens < V)).all()
    assert ((result.top_ids >= 0) & (result.top_ids < V)).all()
    assert not np.isnan(result.logprob).any()
    assert not np.isnan(result.top_logprobs).any()
    if mode == "full":
        forbidden = {*range(30, 39), *EOS, 5}
        assert not forbidden & set(tokens.tolist())


def test_ids_beyond_the_vocabulary_are_refused():
    for name in ("prompt_token_ids", "output_token_ids", "allowed_token_ids"):
        for bad in (V, -1) if name != "allowed_token_ids" else (V,):
            given = {"prompt_token_ids": (), "output_token_ids": ()}
            params = SamplingParams()
            if name == "allowed_token_ids":
                params = SamplingParams(allowed_token_ids=[bad])
            else:
                given[name] = (0, bad)
            with pytest.raises(InvalidRequestError, match=f"{name} holds token id {bad};"):
                slot_row(params, seed=0, eos_token_ids=(), vocab_size=V, **given)


def test_too_many_ids_that_end_the_sequence():
    params = SamplingParams(stop_token_ids=list(range(64)))
    with pytest.raises(InvalidRequestError, match="81 token ids end this sequence"):
        slot_row(
            params,
            seed=0,
            prompt_token_ids=(),
            output_token_ids=(),
            eos_token_ids=range(64, 81),
            vocab_size=100,
        )
