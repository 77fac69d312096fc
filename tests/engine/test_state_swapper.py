"""Which part of a sequence's state is swapped, and what follows if the other part is lost."""

import pytest

from rjax.batch.page_operations import SwapIn, SwapInState
from rjax.batch.step_worker import PoolSize, StatePoolSize
from rjax.config import CacheSettings
from rjax.engine.preemption import PreemptionCost
from rjax.sampling import SamplingParams
from rjax.worker.pages.sizing import host_room

from .fake_worker import fake_engine, next_token
from .invariants import check, run_checked

S, VOCAB = 4, 32
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def engine(**options):
    states = StatePoolSize(num_states=12, state_bytes=8, snapshot_pages=2, tail_bytes=6)
    settings = {"preemption": "swap", "host": 12, "host_states": 3}
    return fake_engine(
        num_pages=24,
        page_size=S,
        vocab=VOCAB,
        max_model_len=32,
        states=states,
        **settings | options,
    )


def start(served, name, prompt, tokens):
    """A running sequence of this many tokens."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
    served.add_request(name, prompt, params)
    while True:
        served.step()
        for sequence in served._scheduler.running:
            if sequence.request_id == name and sequence.num_tokens == tokens:
                return sequence


def answer(prompt):
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(next_token(tokens, 0, VOCAB))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("tokens", "has_tail"), [(12, True), (13, False), (14, True)])
def test_it_goes_on_where_it_was(tokens, has_tail):
    served = engine()
    sequence = start(served, "a", PROMPT, tokens)
    served._scheduler.preempt(sequence)
    saved = sequence.saved_state
    assert (saved.num_computed, saved.has_page, saved.has_tail) == (tokens - 1, True, has_tail)
    assert served.stats().host_bytes_used == -(-saved.num_computed // S) + 8 + 6
    computed = served._worker.computed
    assert run_checked(served)["a"].outputs[0].token_ids == answer(PROMPT)
    assert served._worker.computed - computed == len(PROMPT) + 12 - tokens
    assert served._worker.moved[SwapInState] == 1
    assert served.stats().host_bytes_used == 0


def test_a_shared_state_stays_on_the_device():
    served = engine()
    start(served, "a", PROMPT, 11)
    second = start(served, "b", PROMPT, 11)
    assert served._scheduler.states.pool.references(second.states[1]) == 2
    served._scheduler.preempt(second)
    saved = second.saved_state
    assert (saved.has_page, saved.has_tail, len(second.host_slots)) == (False, True, 1)
    done = run_checked(served)
    assert [done[name].outputs[0].token_ids for name in "ab"] == [answer(PROMPT)] * 2
    assert served._worker.moved[SwapInState] == 1


def test_it_starts_from_the_cache_if_the_shared_part_is_lost():
    served = engine()
    start(served, "a", PROMPT, 11)
    second = start(served, "b", PROMPT, 11)
    served._scheduler.preempt(second)
    served.abort_request("a")
    served.reset_prefix_cache()
    assert run_checked(served)["b"].outputs[0].token_ids == answer(PROMPT)
    assert served._worker.moved[SwapInState] == served._worker.moved[SwapIn] == 0
    assert served._scheduler.host_states.num_used == served._scheduler.host.num_used == 0


def test_without_a_host_slot_it_is_computed_again():
    served = engine(host_states=0)
    sequence = start(served, "a", PROMPT, 12)
    served._scheduler.preempt(sequence)
    assert (sequence.saved_state, sequence.host_slots) == (None, {})
    check(served)
    assert run_checked(served)["a"].outputs[0].token_ids == answer(PROMPT)
    assert served.stats().swaps == 0


def test_a_tail_that_has_the_last_token_is_not_saved():
    """A late mask makes the last token be computed again."""
    served = engine()
    sequence = start(served, "a", PROMPT, 12)
    swapper = served._scheduler._swapper
    assert swapper.states.plan(sequence) is not None
    sequence.num_tokens -= 1
    assert swapper.states.plan(sequence) is None
    assert not swapper.swap_out(sequence)


def test_the_choice_counts_bytes_of_the_state_and_tokens_behind_a_kept_one(monkeypatch):
    served = engine(preemption="auto")
    start(served, "a", PROMPT, 11)
    second = start(served, "b", PROMPT, 16)  # 15 tokens, 8 of them with pages that "a" holds
    given = {}

    def choose(cost, **of):
        given.update(of)
        return "recompute"

    monkeypatch.setattr(PreemptionCost, "choose", choose)
    assert not served._scheduler._swapper.swap_out(second)
    assert given["pages"] == 2 + 8 + 6
    assert given["tokens"] == 15 - 8


def test_host_memory_is_divided():
    states = StatePoolSize(num_states=4, state_bytes=60, snapshot_pages=1, tail_bytes=40)
    settings = CacheSettings(swap_space="1KiB")
    assert host_room(settings, PoolSize(50, 10, (None,), states)) == (52, 5)
    assert host_room(settings, PoolSize(50, 10, (None,))) == (102, 0)
    assert host_room(CacheSettings(swap_space="1MiB"), PoolSize(50, 10, (None,), states)) == (
        400,
        32,
    )
    assert host_room(CacheSettings(swap_space=0), PoolSize(50, 10, (None,), states)) == (0, 0)
