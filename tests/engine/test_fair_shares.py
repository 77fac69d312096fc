"""Rows of steps are divided evenly among the shares that have sequences."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rjax.engine.fair_shares import PATIENCE
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from tests.properties import num_examples

from .fake_worker import fake_engine, next_token
from .invariants import check
from .invariants import run_checked as run

pytestmark = pytest.mark.usefixtures("no_annotations_checked")

FIRST = -(2**31)  # the most urgent priority that fits into 32 bits


def engine_of(num_seqs, ahead=0, **options):
    """An engine with room for all tokens and pages, and a record of each step.

    A record is three counts of sequences by share: those that generate and all that run at the
    begin of the step, and those that run when it is chosen.
    """
    most = {"max_num_seqs": num_seqs, "max_num_prefill_ahead": ahead, "vocab": 64}
    given = {"max_num_batched_tokens": 512, "num_pages": 999, "host": 0, "max_model_len": 64}
    engine = fake_engine(**(most | given | options))
    scheduler, records = engine._scheduler, []
    schedule, arrange = scheduler.schedule, scheduler._shares.arrange
    arranged = []

    def note_arranged(running):
        victim = arrange(running)
        arranged[:] = running
        return victim

    def note_schedule():
        found = schedule()
        rows = arranged[:num_seqs], arranged, scheduler.running
        records.append([Counter(s.share for s in group) for group in rows])
        return found

    scheduler._shares.arrange, scheduler.schedule = note_arranged, note_schedule
    return engine, records


def add(engine, name, share, *, tokens=4, n=1, priority=0):
    """A request with a prompt that no other has."""
    number = len(engine._requests)
    prompt = [number % 64, number // 64, len(str(share)), 1]
    params = SamplingParams(max_tokens=tokens, n=n, seed=1, ignore_eos=True)
    engine.add_request(name, prompt, params, share=share, priority=priority)
    return prompt


@settings(
    max_examples=num_examples(30), suppress_health_check=[HealthCheck.too_slow], deadline=None
)
@given(
    num_seqs=st.integers(1, 7),
    ahead=st.sampled_from([0, 0, 1, 5]),
    shares=st.integers(2, 4),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 9), st.sampled_from([0, 5, FIRST])),
        min_size=20,
        max_size=50,
    ),
)
def test_shares_that_wait_are_within_one_row_of_each_other(num_seqs, ahead, shares, requests):
    engine, records = engine_of(num_seqs, ahead)
    for i, (share, tokens, priority) in enumerate(requests):
        add(engine, str(i), f"s{share % shares}", tokens=tokens, priority=priority)
    scheduler = engine._scheduler
    while engine.has_unfinished_requests():
        engine.step()
        check(engine)
        if not records:
            continue
        leading, rows, chosen = records.pop()
        for share in {s.share for s in scheduler.waiting}:
            assert max(chosen.values()) - chosen[share] <= 1
        for count in leading.values():
            for other in rows:
                assert count - leading[other] <= 1 or leading[other] == rows[other]


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("priority", [0, FIRST])
def test_a_newcomer_gets_its_rows_while_another_holds_all(ahead, priority):
    """Its first after a few steps, and half of them a step later each."""
    engine, records = engine_of(8, ahead)
    prompts = {"a0": add(engine, "a0", "a", tokens=58, n=8, priority=priority)}
    for i in range(1, 9):
        prompts[f"a{i}"] = add(engine, f"a{i}", "a", tokens=58, priority=priority)
    run(engine, until=lambda: len(records) == 5)
    assert records[-1][2] == {"a": 8 + ahead}
    for i in range(9):
        add(engine, f"b{i}", "b", tokens=40)
    start = len(records)
    ended = run(engine)
    of_b = [leading["b"] for leading, _, _ in records[start:]]
    assert 1 in of_b[: PATIENCE + 3]
    assert 4 in of_b[: PATIENCE + 3 + 8]
    # Nothing that gave its row away is lost.
    for name, prompt in prompts.items():
        for completion in ended[name].outputs:
            tokens = list(prompt)
            for _ in range(58):
                tokens.append(next_token(tokens, completion.index, 64))
            assert completion.token_ids == tokens[4:]


def test_nobody_is_preempted_where_rows_end_by_themselves():
    engine, records = engine_of(8)
    for i in range(40):
        add(engine, f"a{i}", "a", tokens=4 + i % 8)
    run(engine, until=lambda: len(records) == 5)
    for i in range(40):
        add(engine, f"b{i}", "b", tokens=4 + i % 8)
    start = len(records)
    run(engine)
    assert engine._scheduler.num_preemptions == 0
    assert any(leading == {"a": 4, "b": 4} for leading, _, _ in records[start : start + 12])


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_shares_take_turns_in_a_single_row(ahead):
    """However many requests one of them has, and whatever their priority."""
    engine, _ = engine_of(1, ahead)
    for i in range(12):
        add(engine, f"a{i}", "a", priority=FIRST)
    for i in range(4):
        add(engine, f"b{i}", "b")
    ended = list(run(engine))
    first_two = [name[0] for name in ended[:8]]
    assert sorted(first_two) == ["a"] * 4 + ["b"] * 4
    assert all(set(first_two[i : i + 2]) == {"a", "b"} for i in (0, 2, 4, 6))


def test_priority_and_arrival_decide_within_a_share():
    engine, _ = engine_of(2)
    for share in "ab":
        for i, priority in enumerate([5, 5, FIRST, 0]):
            add(engine, f"{share}{i}", share, priority=priority)
    ended = list(run(engine))
    for share in "ab":
        assert [name for name in ended if name[0] == share] == [f"{share}{i}" for i in (2, 3, 0, 1)]


def test_a_share_that_waits_for_pages_gets_them():
    """One share has the whole pool and free slots besides."""
    engine, records = engine_of(16, num_pages=60, preemption="recompute")
    for i in range(6):
        add(engine, f"a{i}", "a", tokens=60)
    run(engine, until=lambda: len(records) == 12)
    add(engine, "b", "b", tokens=2)
    start = len(records)
    run(engine, until=lambda: len(records) == start + PATIENCE + 8)
    assert "b" not in engine._requests
    assert engine._requests
    run(engine)


def test_samples_that_wait_for_their_own_prompt_take_no_rows_of_others():
    engine, records = engine_of(8, max_num_batched_tokens=9, windows=(None, 5))
    for i in range(7):
        add(engine, f"a{i}", "a", tokens=50)
    run(engine, until=lambda: len(records) == 6)
    params = SamplingParams(max_tokens=2, n=4, seed=1, ignore_eos=True)
    engine.add_request("b", list(range(60)), params, share="b")
    run(engine, until=lambda: engine._scheduler.running[-1].num_computed > 40)
    assert engine._scheduler.num_preemptions == 0


def test_a_single_share_is_scheduled_as_none():
    """Its name changes nothing, step for step."""

    def batches(share):
        engine, _ = engine_of(3, 2, num_pages=33, max_num_batched_tokens=7)
        found, dispatch = [], engine._worker.dispatch

        def record(batch, tables, **options):
            found.append([(i.sequence.request_id, i.sequence.index, *i[1:4]) for i in batch])
            return dispatch(batch, tables, **options)

        engine._worker.dispatch = record
        for i in range(15):
            add(engine, str(i), share, n=1 + i % 3, tokens=10 + i, priority=i % 4)
        run(engine)
        return found, engine._scheduler.num_preemptions

    assert batches(None) == batches("a")
    assert batches(None)[1] > 0


@pytest.mark.parametrize("share", ["", "x" * 257, 5, b"a"])
def test_a_share_has_a_short_name(share):
    engine, _ = engine_of(1)
    with pytest.raises(InvalidRequestError, match=r"share is .*; give a text of 1 to 256"):
        engine.add_request("0", [1], SamplingParams(), share=share)
