"""A slow mask delays its own sequence: the others go on, and every token is the same."""

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rjax.engine import mask_threads, request_masks
from rjax.sampling import SamplingParams
from tests.properties import num_examples

from .test_token_mask import Script
from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

PROMPT = list(range(5, 26))
GREEDY = SamplingParams(temperature=0, max_tokens=12)


class SlowScript(Script):
    """Waits for a gate before it takes a token."""

    may_be_slow = True

    def __init__(self, tokens: list[int], gate=lambda number: None, **options) -> None:
        super().__init__(tokens, **options)
        self._gate = gate

    def accept(self, token_id: int) -> None:
        self._gate(len(self.taken))
        super().accept(token_id)


class Gate:
    """Holds the masks at one token until it is opened."""

    def __init__(self, number: int) -> None:
        self.number, self.reached, self.open = number, threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        if number == self.number:
            self.reached.set()
            assert self.open.wait(60)


@pytest.fixture(scope="module")
def engine(tiny):
    return make_engine(tiny)


def steps_until(engine, condition, seconds: float = 60) -> list:
    """Outputs of the steps until a condition holds."""
    end, outputs = time.monotonic() + seconds, []
    while not condition(outputs):
        assert time.monotonic() < end
        outputs += engine.step()
    return outputs


def ended(name: str):
    return lambda outputs: any(o.request_id == name and o.finished for o in outputs)


def last(outputs, name: str):
    return [o for o in outputs if o.request_id == name][-1].outputs


@pytest.mark.parametrize("number", [0, 1, 5])
def test_others_go_on_while_a_mask_is_late(engine, number):
    alone = run(engine, [("alone", PROMPT, GREEDY)])["alone"].outputs[0].token_ids
    gate, tokens = Gate(number), list(range(30, 42))
    engine.add_request("slow", PROMPT, GREEDY, masks=[SlowScript(tokens, gate)])
    engine.add_request("free", PROMPT, GREEDY)
    before = engine.stats().preemptions
    outputs = steps_until(engine, ended("free"))
    assert last(outputs, "free")[0].token_ids == alone
    assert not ended("slow")(outputs)
    outputs += steps_until(engine, lambda _: gate.reached.is_set())
    outputs += steps_until(engine, lambda _: engine.stats().preemptions > before)
    engine.add_request("later", PROMPT, GREEDY)  # also one that comes meanwhile
    outputs += steps_until(engine, ended("later"))
    assert not ended("slow")(outputs)
    gate.open.set()
    outputs += steps_until(engine, ended("slow"))
    assert last(outputs, "slow")[0].token_ids == tokens
    engine.reset_prefix_cache()
    assert engine.stats().kv_bytes_used == 0


def test_the_engine_does_not_spin_while_it_waits_for_a_mask(engine):
    gate = Gate(2)
    engine.add_request("slow", PROMPT, GREEDY, masks=[SlowScript(list(range(12)), gate)])
    steps_until(engine, lambda _: gate.reached.is_set())
    for _ in range(4):
        engine.step()  # until nothing is in flight
    used = time.thread_time()
    for _ in range(20):
        assert engine.step() == []
    waited = 20 * 0.01
    assert time.thread_time() - used < waited / 2
    gate.open.set()
    assert last(steps_until(engine, ended("slow")), "slow")[0].token_ids == list(range(12))


def test_a_late_sequence_may_be_aborted(engine):
    gate = Gate(3)
    engine.add_request("slow", PROMPT, GREEDY, masks=[SlowScript(list(range(12)), gate)])
    engine.add_request("free", PROMPT, GREEDY)
    steps_until(engine, ended("free"))
    engine.abort_request("slow")
    outputs = steps_until(engine, ended("slow"))
    assert last(outputs, "slow")[0].finish_reason == "abort"
    gate.open.set()
    assert run(engine, [("next", PROMPT, GREEDY)])["next"].outputs[0].finish_reason == "length"
    engine.reset_prefix_cache()
    assert engine.stats().kv_bytes_used == 0


@pytest.mark.parametrize("late", [False, True])
def test_a_failing_mask_ends_its_sample_alone(engine, late):
    gate = Gate(3)
    if not late:
        gate.open.set()
    scripts = [SlowScript(list(range(10 * i, 10 * i + 8))) for i in range(3)]
    scripts[1] = SlowScript(list(range(8)), gate, fails_after=4)
    engine.add_request("three", PROMPT, SamplingParams(n=3, max_tokens=8), masks=scripts)
    engine.add_request("free", PROMPT, GREEDY)
    outputs = steps_until(engine, ended("free"))
    gate.open.set()
    if not ended("three")(outputs):
        outputs += steps_until(engine, ended("three"))
    found = last(outputs, "three")
    ends = [(o.finish_reason, len(o.token_ids)) for o in found]
    assert ends == [("length", 8), ("error", 4), ("length", 8)]
    assert found[1].stop_reason == "this mask cannot go on"


def test_threads_end_when_they_are_idle(engine, monkeypatch):
    def threads() -> int:
        return sum(thread.name == "rjax-masks" for thread in threading.enumerate())

    monkeypatch.setattr(mask_threads, "_IDLE_SECONDS", 0.05)
    for number in range(2):  # and others start again
        engine.add_request(f"slow {number}", PROMPT, GREEDY, masks=[SlowScript(list(range(12)))])
        steps_until(engine, ended(f"slow {number}"))
        end = time.monotonic() + 30
        while threads():
            assert time.monotonic() < end
            time.sleep(0.02)


@settings(max_examples=num_examples(12), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), patience=st.sampled_from([0.0, 0.001, 0.02]))
def test_tokens_do_not_depend_on_when_masks_are_ready(engine, monkeypatch_module, seed, patience):
    """Penalties, seeds and samples: as with masks that are never late."""
    draw = random.Random(seed)
    requests = []
    for i in range(5):
        params = SamplingParams(
            temperature=1.0,
            seed=i,
            n=draw.choice([1, 1, 3]),
            max_tokens=draw.randint(1, 14),
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            logprobs=draw.choice([None, 2]),
        )
        delays = [draw.choice([0.0, 0.0, 0.0, 0.004, 0.03]) for _ in range(64)]
        requests.append((f"r{i}", PROMPT[: draw.randint(3, 21)], params, delays))

    def answers(slow: bool) -> dict:
        monkeypatch_module.setattr(request_masks, "_PATIENCE", patience)
        for name, prompt, params, delays in requests:
            kind = SlowHalf if slow else Half
            masks = [kind(name, delays[i:]) for i in range(params.n)] if name != "r0" else []
            engine.add_request(name, prompt, params, masks=masks)
        done = run(engine, [])
        return {
            name: [(o.token_ids, o.finish_reason, _rounded(o.logprobs)) for o in output.outputs]
            for name, output in done.items()
        }

    assert answers(slow=True) == answers(slow=False)


class Half:
    """Allows half of the tokens, those that depend on the ones before."""

    def __init__(self, name: str, delays: list[float]) -> None:
        self._state, self._delays, self._number = sum(name.encode()), delays, 0

    @property
    def bitmask(self) -> np.ndarray:
        allowed = np.random.default_rng(self._state).permutation(VOCAB)[: VOCAB // 2]
        words = np.zeros(-(-VOCAB // 32), np.uint32)
        np.bitwise_or.at(words, allowed // 32, (1 << allowed % 32).astype(np.uint32))
        return words

    def accept(self, token_id: int) -> None:
        self._state = (self._state * 31 + token_id) % 2**31
        self._number += 1


class SlowHalf(Half):
    may_be_slow = True

    def accept(self, token_id: int) -> None:
        time.sleep(self._delays[self._number])
        super().accept(token_id)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def _rounded(logprobs):
    if logprobs is None:
        return None
    return [{token: round(x.logprob, 3) for token, x in entry.items()} for entry in logprobs]
