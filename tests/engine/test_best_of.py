"""``best_of``: more samples are generated than are given back, and the likeliest come back."""

import dataclasses

import numpy as np
import pytest

from rjax.errors import InvalidRequestError
from rjax.sampling import RequestOutputKind, SamplingParams

from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

PROMPT = [3, 1, 4, 1, 5]
BEST = SamplingParams(n=2, best_of=5, seed=7, max_tokens=6)


@pytest.fixture(scope="module")
def engine(tiny):
    return make_engine(tiny, num_pages=64)


def ask(engine, params):
    return run(engine, [("r", PROMPT, params)])["r"]


def ranked(engine, params):
    """All samples with their log-probabilities, the likeliest first."""
    every = dataclasses.replace(params, n=params.best_of, best_of=None, logprobs=0)
    return sorted(ask(engine, every).outputs, key=lambda o: -o.cumulative_logprob)


@pytest.mark.thorough
def test_the_likeliest_samples_are_given_back(engine):
    want = ranked(engine, BEST)
    before = engine.stats().output_tokens
    found = ask(engine, BEST)
    assert [o.token_ids for o in found.outputs] == [o.token_ids for o in want[:2]]
    assert [o.token_ids for o in found.outputs] != [o.token_ids for o in want[-2:]]
    assert [o.index for o in found.outputs] == [0, 1]
    for output, like in zip(found.outputs, want[:2], strict=True):
        assert output.cumulative_logprob == like.cumulative_logprob
        assert output.logprobs is None, "they were not asked for"
    assert engine.stats().output_tokens - before == 5 * 6, "the engine counts what it generated"


def test_logprobs_are_there_where_they_were_asked_for(engine):
    found = ask(engine, dataclasses.replace(BEST, logprobs=2))
    for output in found.outputs:
        assert output.logprobs is not None
        total = sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True))
        assert output.cumulative_logprob == pytest.approx(total)


@pytest.mark.thorough
def test_best_of_n_is_n(engine):
    plain = dataclasses.replace(BEST, best_of=None)
    same = dataclasses.replace(BEST, best_of=2)
    assert ask(engine, same).outputs == ask(engine, plain).outputs
    assert ask(engine, plain).outputs[0].cumulative_logprob is None


def test_the_best_so_far_are_told_of_while_it_runs(engine):
    engine.add_request("r", PROMPT, BEST)  # CUMULATIVE
    told = []
    while engine.has_unfinished_requests():
        told += engine.step()
    assert len(told) == BEST.max_tokens
    for output in told:
        sums = [o.cumulative_logprob for o in output.outputs]
        assert len(sums) == 2
        assert sums == sorted(sums, reverse=True)


@pytest.mark.parametrize("n", [1, 3])
def test_a_sample_that_was_cut_off_is_never_better_than_a_whole_one(engine, n):
    """Samples end at their own times; those without an end have few tokens when time is up. The
    choice is not what it would have been, so every output is aborted."""
    stop = [token for token in range(VOCAB) if token % 3 == 0]
    params = dataclasses.replace(
        BEST, n=n, best_of=8, max_tokens=100, stop_token_ids=stop, seed=1,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    engine.add_request("r", PROMPT, params)
    request = engine._requests["r"]
    while not any(c.finished for c in request.completions):
        assert engine.step() == []
    assert not all(c.finished for c in request.completions)
    engine.abort_request("r")
    outputs = run(engine, [])["r"].outputs
    assert outputs[0].token_ids[-1] in stop, "it is a whole one"
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == [("abort", None)] * n
    assert engine._blocks.counts().used == 0


@pytest.mark.thorough
def test_every_sample_has_its_mask(engine):
    class Only:
        def __init__(self, token: int) -> None:
            self.bitmask = np.zeros(-(-VOCAB // 32), np.uint32)
            self.bitmask[token // 32] = np.uint32(1 << token % 32)

        def accept(self, token_id: int) -> None:
            """Nothing changes."""

    tokens = [10, 20, 30, 40, 50]
    engine.add_request("r", PROMPT, BEST, masks=[Only(token) for token in tokens])
    found = run(engine, [])["r"].outputs
    assert len({o.token_ids[0] for o in found}) == 2
    assert all(o.token_ids == [o.token_ids[0]] * 6 and o.token_ids[0] in tokens for o in found)
    with pytest.raises(InvalidRequestError, match="2 masks for 5 samples"):
        engine.add_request("r", PROMPT, BEST, masks=[Only(1), Only(2)])


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_the_choice_does_not_depend_on_room(tiny, engine, preemption):
    params = dataclasses.replace(BEST, n=1, best_of=4, max_tokens=30)
    small = make_engine(tiny, num_pages=24, preemption=preemption)
    requests = [(str(i), [i] * 17, params) for i in range(3)]
    want, got = run(engine, requests), run(small, requests)
    assert small.stats().preemptions > 0
    for name in want:
        assert got[name].outputs[0].token_ids == want[name].outputs[0].token_ids
