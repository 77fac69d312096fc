"""Prompts of sequences that wait are computed in what rows the steps of others have to spare."""

import pytest

from rjax.batch.page_groups import one_group
from rjax.batch.step_limits import StepLimits, step_limits
from rjax.config import SchedulerSettings
from rjax.pallas_kernels.attention.plan.host import PlanShape
from rjax.sampling import SamplingParams
from rjax.worker.step.shape import ShapeTable

from .fake_worker import fake_engine
from .invariants import run_checked as run
from .tiny import make_engine
from .tiny import run as run_tiny

pytestmark = pytest.mark.usefixtures("kept")

EIGHT = SamplingParams(max_tokens=8, seed=1)


def engine_of(count, **options):
    """Requests with prompts of 5 tokens that share nothing, two at once, and the steps' batches."""
    given = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "vocab": 64, "num_pages": 99}
    engine = fake_engine(**(given | options))
    batches, dispatch = [], engine._worker.dispatch

    def record(batch, tables, **options):
        batches.append(list(batch))
        return dispatch(batch, tables, **options)

    engine._worker.dispatch = record
    for i in range(count):
        engine.add_request(str(i), [i, 20 + i, 40 + i, i, i], EIGHT)
    return engine, batches


def sampling(batch):
    """Names of the requests that a step samples for."""
    return {item.sequence.request_id for item in batch if item.samples}


def test_a_free_place_is_taken_in_the_next_step():
    engine, batches = engine_of(6, spare_rows=6)
    run(engine)
    last = max(n for n, batch in enumerate(batches) if len(batch) > 1)
    assert all(len(sampling(batch)) == 2 for batch in batches[:last])
    assert len(batches) == 8 * 3


def test_without_it_places_stay_empty():
    engine, batches = engine_of(6, spare_rows=6, max_num_prefill_ahead=0, max_num_batched_tokens=6)
    run(engine)
    assert any(len(sampling(batch)) < 2 for batch in batches[1:-8])


def test_prompts_ahead_fill_spare_rows_and_leave_their_last_token():
    engine, batches = engine_of(6, spare_rows=6)
    run(engine, until=lambda: len(batches) == 3)
    first, second, third = (
        [(item.sequence.request_id, item.start, item.stop, item.samples) for item in batch]
        for batch in batches
    )
    # Ten tokens of the first two, no spare rows: the others wait.
    assert first == [("0", 0, 5, True), ("1", 0, 5, True)]
    assert second[2:] == [("2", 0, 4, False)]
    assert third[2:] == [("3", 0, 4, False)]


def test_those_ahead_give_up_their_pages_first():
    engine, batches = engine_of(3, spare_rows=6, num_pages=14, host=0, preemption="recompute")
    ended = run(engine)
    preempted = {s.request_id for s in engine._worker.truth if s.num_preemptions}
    assert preempted == {"2"}
    assert len(ended) == 3


def test_whoever_goes_first_takes_the_place_of_the_last():
    engine, batches = engine_of(3, spare_rows=6)
    run(engine, until=lambda: len(batches) == 3)
    engine.add_request("first", [9, 8, 7], EIGHT, priority=-1)
    run(engine)
    named = [sampling(batch) for batch in batches]
    start = next(n for n, names in enumerate(named) if "first" in names)
    assert start <= 5
    assert all(names == {"first", "0"} for names in named[start : start + 3])


@pytest.mark.parametrize("n", [1, 3])
def test_the_same_tokens_with_any_number_ahead(n):
    said = []
    for ahead in (0, 1, 4):
        engine = fake_engine(num_pages=30, max_num_seqs=3, max_num_prefill_ahead=ahead, vocab=50)
        for i in range(7):
            params = SamplingParams(n=n, max_tokens=4 + i % 3, seed=1)
            engine.add_request(str(i), [i % 3] * (1 + i), params)
        ended = run(engine)
        said.append({k: [c.token_ids for c in o.outputs] for k, o in ended.items()})
    assert said[0] == said[1] == said[2]


@pytest.mark.thorough
def test_a_model_says_the_same_and_nothing_is_compiled_anew(tiny):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    requests = [(str(i), [7] * 20 + [1 + i] * (3 + 5 * i), params) for i in range(9)]
    said = []
    for ahead in (0, 3):
        engine = make_engine(
            tiny,
            max_num_seqs=2,
            max_num_prefill_ahead=ahead,
            num_pages=48,
        )
        engine._worker.warmup(modes=("greedy",))
        compiled = engine._worker.num_compiled
        outputs = run_tiny(engine, requests)
        said.append({k: output.outputs[0].token_ids for k, output in outputs.items()})
        assert engine._worker.num_compiled == compiled
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("settings", "spare", "limits"),
    [
        ({}, 128, StepLimits(64, 2048, 64, 128)),
        ({}, 0, StepLimits(64, 2048)),
        ({"max_num_seqs": 128}, 128, StepLimits(128, 2048)),
        ({"max_num_prefill_ahead": 0}, 128, StepLimits(64, 2048)),
        ({"max_num_prefill_ahead": 3}, 0, StepLimits(64, 2048, 3, 2048)),
        ({"max_num_batched_tokens": 100}, 128, StepLimits(64, 100, 64, 100)),
        ({"max_num_batched_tokens": 64}, 128, StepLimits(64, 64)),
    ],
)
def test_limits(settings, spare, limits):
    given = SchedulerSettings(**({"max_num_seqs": 64} | settings))
    found = step_limits(given, most_tokens=2048, spare_rows=spare)
    assert found == limits


def test_steps_have_rows_of_the_page_table_for_those_ahead():
    table = ShapeTable(
        limits=StepLimits(4, 64, 9, 16),
        max_model_len=64,
        page_size=8,
        plan_shape=lambda rows, seqs, *_: PlanShape(rows, seqs, 64, rows, 8),
        padded_rows=lambda rows: rows,
        growth=2,
        groups=one_group(2),
    )
    found = {(shape.rows, shape.seqs) for shape in table.all}
    assert found == {(1, 1), (2, 2), (4, 4), (16, 12), (32, 4), (64, 4)}
    one_token_each = table.choose(rows=12, seqs=12)
    assert (one_token_each.rows, one_token_each.seqs) == (16, 12)
