"""What goes to host memory is on its way while later steps run; who does not want it waits not."""

import threading

import numpy as np
import pytest

from rjax.engine.page_operations import CopyPages, SwapIn, SwapOut
from rjax.engine.sequence import SequenceStatus
from rjax.sampling import SamplingParams
from rjax.worker import page_mover

from .tiny import VOCAB, make_engine, run


@pytest.fixture
def arrive(monkeypatch):
    """Until it is set, nothing that is swapped out arrives."""
    event, bytes_of = threading.Event(), page_mover._bytes_of

    def late(data):
        assert event.wait(60)
        return bytes_of(data)

    monkeypatch.setattr(page_mover, "_bytes_of", late)
    yield event
    event.set()


def test_only_who_wants_the_pages_waits_for_them(tiny, arrive):
    worker = make_engine(tiny, swap_space=2**22)._worker
    data = np.random.default_rng(0).normal(size=(64, *worker.page_shape)).astype(np.float32)
    arrive.set()
    worker.write_pages(list(range(64)), data)
    worker.move([SwapOut([9], [9])])
    worker.move([SwapIn([9], [9])])

    arrive.clear()
    worker.move([SwapOut([0, 1], [0, 1])])
    worker.move([CopyPages([2], [0]), SwapIn([9], [1])])  # the pages serve others meanwhile
    assert not arrive.is_set(), "nothing so far has waited"
    threading.Timer(0.2, arrive.set).start()
    worker.move([SwapIn([1, 0], [5, 6])])
    assert arrive.is_set(), "but this had to"
    want = data.copy()
    want[[0, 1, 5, 6]] = data[[2, 9, 1, 0]]
    np.testing.assert_array_equal(worker.read_pages(list(range(64))), want)


def test_slots_that_are_used_again_hold_the_last(tiny, arrive):
    worker = make_engine(tiny, swap_space=2**22)._worker
    data = np.random.default_rng(0).normal(size=(64, *worker.page_shape)).astype(np.float32)
    worker.write_pages(list(range(64)), data)
    worker.move([SwapOut([0, 1], [3, 4]), SwapOut([7, 8], [4, 5])])
    arrive.set()
    worker.move([SwapIn([3, 4, 5], [20, 21, 22])])
    np.testing.assert_array_equal(worker.read_pages([20, 21, 22]), data[[0, 7, 8]])


def test_too_many_on_their_way_are_waited_for(tiny, arrive):
    worker = make_engine(tiny, swap_space=2**22)._worker
    most = page_mover._MOST_PENDING
    worker.move([SwapOut([i], [i]) for i in range(most)])
    assert not arrive.is_set()
    threading.Timer(0.2, arrive.set).start()
    worker.move([SwapOut([most], [most])])
    assert arrive.is_set()


def test_an_error_on_the_way_is_not_lost(tiny, monkeypatch):
    worker = make_engine(tiny, swap_space=2**22)._worker
    monkeypatch.setattr(page_mover, "_bytes_of", lambda data: 1 / 0)
    worker.move([SwapOut([0], [0])])
    with pytest.raises(ZeroDivisionError):
        worker.move([SwapIn([0], [1])])


def test_the_others_run_on_while_a_sequence_is_swapped_out(tiny, arrive):
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=60)
    requests = [(str(i), rng.integers(0, VOCAB, 30).tolist(), params) for i in range(3)]
    want = run(make_engine(tiny), requests)
    engine = make_engine(tiny, num_pages=24, preemption="swap")
    for request in requests:
        engine.add_request(*request)
    victim = engine._requests["2"].sequences[0]
    while victim.status is not SequenceStatus.SWAPPED:
        engine.step()
    told = engine.stats().output_tokens
    for _ in range(10):
        engine.step()
    assert engine.stats().output_tokens >= told + 2 * 9
    assert not arrive.is_set(), "ten steps while its pages were on their way"
    arrive.set()
    got = run(engine, [])
    assert victim.num_preemptions > 0
    for name, output in got.items():
        assert output.outputs[0].token_ids == want[name].outputs[0].token_ids
    assert len(got) == 3
