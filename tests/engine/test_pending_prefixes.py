"""Prefixes computed as requests among others, and requests that fail alone inside a step."""

import contextlib
import random

import pytest

from rjax.engine import llm_engine
from rjax.engine.protocol import KeepAs
from rjax.errors import InvalidConfigError, InvalidRequestError, OutOfMemoryError
from rjax.sampling import SamplingParams

from .fake_worker import fake_engine
from .invariants import check
from .tiny import run

GREEDY = SamplingParams(temperature=0, max_tokens=5)
ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture
def engine():
    return fake_engine(num_pages=64, page_size=4, vocab=9, max_model_len=64)


def cached(engine, tokens, **options):
    engine.add_request("r", tokens, GREEDY, **options)
    return run(engine, [])["r"].num_cached_tokens


def test_a_prompt_is_kept_when_its_request_has_finished(engine):
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for i in range(4):  # every slot
        engine.add_request(f"stream {i}", [i], long)
    engine.add_request("p", [7] * 18, ONE, keep_as=KeepAs("rules", "seven"), cache_salt="me")
    told = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            told += output.request_id.startswith("stream")
            if output.request_id == "p":
                assert output.error is None
                assert told > 4 * 30, "the others went on meanwhile"
        check(engine)
    [kept] = engine.prefixes()
    assert (kept.name, kept.token_ids, kept.text) == ("rules", (7,) * 18, "seven")
    engine.reset_prefix_cache()
    assert cached(engine, [*[7] * 18, 1], cache_salt="me") == 18
    assert cached(engine, [1], prefix="rules") == 18
    engine.drop_prefix("rules")
    engine.reset_prefix_cache()
    assert engine._blocks.counts().used == 0


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_an_aborted_one_keeps_nothing(engine, how):
    engine.add_prefix("a", [1] * 9)
    timeout = 1e-9 if how == "deadline" else None
    engine.add_request("p", [2] * 20, ONE, keep_as=KeepAs("a"), timeout=timeout)
    if how == "abort":
        engine.step()
        engine.abort_request("p")
    assert run(engine, [])["p"].outputs[0].finish_reason == "abort"
    assert [p.token_ids for p in engine.prefixes()] == [(1,) * 9]
    assert not engine._prefixes.pending
    check(engine)


def test_room_is_looked_at_again_when_it_is_kept(engine):
    """Each fits beside what is pinned when it is queued: three of 15 pages beside 16 for others."""
    for i in range(4):
        engine.add_request(f"p{i}", [i] * 60, ONE, keep_as=KeepAs(f"p{i}"))
    found = run(engine, [])
    errors = [output.error for output in found.values() if output.error is not None]
    assert len(errors) == 1
    assert isinstance(errors[0], OutOfMemoryError)
    assert len(engine.prefixes()) == 3
    check(engine)


def test_what_cannot_be_kept_is_not_queued(engine):
    with pytest.raises(InvalidRequestError, match="1 to 256"):
        engine.add_request("p", [1], ONE, keep_as=KeepAs(""))
    with pytest.raises(InvalidRequestError, match="1 to 256"):
        engine.add_request("p", [1], ONE, keep_as=KeepAs("\0shared prefix of the engine"))
    for i in range(3):
        engine.add_prefix(f"p{i}", [i] * 60)
    with pytest.raises(OutOfMemoryError):
        engine.add_request("p", [5] * 60, ONE, keep_as=KeepAs("p"))
    without = fake_engine(num_pages=64, page_size=4, vocab=9, enable_prefix_caching=False)
    with pytest.raises(InvalidConfigError, match="enable_prefix_caching"):
        without.add_request("p", [1], ONE, keep_as=KeepAs("p"))
    for one in (engine, without):
        assert not one.has_unfinished_requests()
        assert not one._prefixes.pending


@pytest.mark.parametrize("seed", range(20))
def test_in_any_order_with_others(seed):
    """Preemption, aborts, equal beginnings: the invariants hold and what is kept is found."""
    draw = random.Random(seed)
    engine = fake_engine(num_pages=24, page_size=2, vocab=3, max_model_len=16)
    for i in range(30):
        prompt = [draw.randrange(3) for _ in range(draw.randint(1, 10))]
        keep = KeepAs(draw.choice("abc")) if draw.random() < 0.5 else None
        with contextlib.suppress(OutOfMemoryError):
            engine.add_request(f"r{i}", prompt, GREEDY if keep is None else ONE, keep_as=keep)
        for _ in range(draw.randrange(3)):
            engine.step()
            check(engine)
        if draw.random() < 0.1:
            engine.abort_request(f"r{draw.randrange(i + 1)}")
        if draw.random() < 0.1 and engine.prefixes():
            engine.drop_prefix(engine.prefixes()[0].name)
    run(engine, [])
    check(engine)
    engine.reset_prefix_cache()
    for prefix in engine.prefixes():
        assert len(prefix.pages) == -(-len(prefix.token_ids) // 2)
        assert cached(engine, [*prefix.token_ids, 0]) == len(prefix.token_ids)


@pytest.mark.parametrize("samples", [1, 3])
def test_sampling_state_that_cannot_be_made_ends_its_request_alone(engine, samples, monkeypatch):
    """Others that share the pages it computed say what they say alone."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    alone = run(fake_engine(num_pages=64, page_size=4, vocab=9, max_model_len=64), [
        ("good", [*prompt, 3], GREEDY)
    ])["good"].outputs[0].token_ids  # fmt: skip
    plain = llm_engine.slot_row

    def refuses(params, **more):
        if params.seed == 666:
            raise InvalidRequestError("too many ids end this sequence")
        return plain(params, **more)

    monkeypatch.setattr(llm_engine, "slot_row", refuses)
    bad = SamplingParams(temperature=1, seed=666, max_tokens=5, n=samples)
    engine.add_request("bad", prompt, bad, keep_as=KeepAs("never"))
    engine.add_request("good", [*prompt, 3], GREEDY)
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id not in done
            if output.finished:
                done[output.request_id] = output
        check(engine)
    assert [o.finish_reason for o in done["bad"].outputs] == ["error"] * samples
    assert {o.stop_reason for o in done["bad"].outputs} == {str(done["bad"].error)}
    assert done["good"].outputs[0].token_ids == alone
    assert engine.prefixes() == []
    engine.reset_prefix_cache()
    assert engine._blocks.counts().used == 0


def test_an_abort_that_fails_ends_its_request_alone(engine, monkeypatch):
    engine.add_request("good", [3], GREEDY)
    engine.add_request("bad", [4], GREEDY)
    engine.step()

    def broken():
        raise ValueError("half a character")

    monkeypatch.setattr(engine._requests["bad"].completions[0], "abort", broken)
    engine.abort_request("bad")
    done = run(engine, [])
    assert done["bad"].outputs[0].finish_reason == "error"
    assert done["good"].outputs[0].finish_reason == "length"
    check(engine)
