"""Samples of one prompt leave the device together and come back together."""

import pytest

from rjax.batch.page_operations import SwapIn, SwapOut
from rjax.batch.sequence import SequenceStatus
from rjax.sampling import SamplingParams

from .fake_worker import fake_engine
from .invariants import check


def engine_with(num_pages, **options):
    return fake_engine(
        num_pages=num_pages,
        page_size=4,
        vocab=9,
        host=40,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        preemption="auto",
        **options,
    )


def finish(engine, watch=lambda: None):
    done = {}
    while engine.has_unfinished_requests():
        done |= {o.request_id: o for o in engine.step() if o.finished}
        check(engine)
        watch()
    return {name: [o.token_ids for o in output.outputs] for name, output in done.items()}


def add(engine):
    engine.add_request("first", [1, 2, 3], SamplingParams(max_tokens=50, seed=1))
    engine.add_request("group", [4] * 18, SamplingParams(n=3, max_tokens=12, seed=1))


def test_a_group_is_swapped_as_a_whole():
    roomy = engine_with(200)
    add(roomy)
    want = finish(roomy)

    engine = engine_with(16)
    add(engine)
    samples = engine._requests["group"].sequences
    running, moves = [], []
    move = engine._worker.move

    def spy(operations):
        moves.extend(o for o in operations if isinstance(o, SwapOut | SwapIn))
        move(operations)

    engine._worker.move = spy

    def watch():
        live = [s for s in samples if s.status is not SequenceStatus.FINISHED]
        running.append(sum(s.status is SequenceStatus.RUNNING for s in live) / max(1, len(live)))

    assert finish(engine, watch) == want
    assert engine.stats().swaps == engine.stats().preemptions == 3
    assert set(running) == {0.0, 1.0}, "all or none of them run"
    out, back = moves
    assert isinstance(out, SwapOut), "in one operation"
    assert isinstance(back, SwapIn)
    shared = 18 // 4
    assert len(set(out.slots)) == len(out.slots) == len(set(out.pages))
    assert len(out.pages) == shared + 3 * 3, "what they share is saved once"
    assert engine._scheduler.host.num_used == 0


def test_a_group_waits_until_there_is_room_for_all_of_it():
    engine = engine_with(16)
    add(engine)
    samples = engine._requests["group"].sequences
    while not any(s.status is SequenceStatus.SWAPPED for s in samples):
        engine.step()
    assert all(s.group_pages == samples[0].group_pages > 0 for s in samples)
    while all(s.status is SequenceStatus.SWAPPED for s in samples):
        before = engine._blocks.num_available
        engine.step()
        check(engine)
    assert all(s.status is SequenceStatus.RUNNING for s in samples)
    assert all(s.group_pages == 0 for s in samples)
    assert before >= 5 + 3, "the prompt's pages and one of each sample's own"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_group_too_large_for_the_pool_goes_on_in_part(preemption):
    params = SamplingParams(n=6, max_tokens=40, seed=2)
    roomy = engine_with(200)
    roomy.add_request("group", [4] * 18, params)
    want = finish(roomy)
    engine = fake_engine(
        num_pages=20, page_size=4, vocab=9, host=40, max_model_len=64, preemption=preemption,
        max_num_seqs=8, max_num_batched_tokens=64,
    )  # fmt: skip
    engine.add_request("group", [4] * 18, params)
    assert finish(engine) == want
    assert engine.stats().preemptions > 0
