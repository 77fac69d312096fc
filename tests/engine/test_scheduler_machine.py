"""The engine over a fake worker under random use: every invariant after every step."""

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rjax.batch.page_groups import pages_held
from rjax.batch.step_worker import StatePoolSize
from rjax.errors import EnginePausedError, InvalidWeightsError, OutOfMemoryError
from rjax.sampling import SamplingParams
from tests.properties import num_examples

from .fake_worker import fake_engine, next_token
from .invariants import check

pytestmark = pytest.mark.usefixtures("no_annotations_checked")

GREEDY = SamplingParams(temperature=0, max_tokens=1)
LENGTH = 16  # most tokens of a sequence


def spoken(prompt, index, versions):
    """What a sample of the fake model says with these versions of its weights."""
    tokens = list(prompt)
    for version in versions:
        tokens.append(next_token(tokens, index, 2, version))
    return tokens[len(prompt) :]


class EngineMachine(RuleBasedStateMachine):
    """Requests come, step, and go over a tiny pool and a vocabulary of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = None

    windows = ((None,),)  # choices, of each page group
    has_states = False

    @initialize(
        pages=st.integers(8, 20),
        host=st.integers(0, 12),
        preemption=st.sampled_from(["auto", "swap", "recompute"]),
        caching=st.booleans(),
        page_size=st.sampled_from([2, 3, 4]),
        ahead=st.sampled_from([0, 1, 5]),
        choice=st.integers(0, 5),
        states=st.builds(
            StatePoolSize, st.integers(2, 14), st.just(1), st.integers(1, 3), st.just(1)
        ),
        host_states=st.integers(0, 4),
    )
    def start(
        self, pages, host, preemption, caching, page_size, ahead, choice, states, host_states
    ):
        windows = self.windows[choice % len(self.windows)]
        least = pages_held(windows, LENGTH, page_size)
        self.engine = fake_engine(
            num_pages=max(8, least) + pages - 8,
            windows=windows,
            host=host,
            page_size=page_size,
            preemption=preemption,
            enable_prefix_caching=caching,
            max_num_prefill_ahead=ahead,
            states=states if self.has_states else None,
            host_states=host_states if self.has_states else 0,
        )
        self.asked = {}
        self.ended = {}
        self.aborted = set()
        self.kept = set()
        self.count = 0
        self.quiet = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=LENGTH - 1),
        n=st.integers(1, 3),
        more=st.integers(0, 2),
        salt=st.sampled_from([None, None, "x"]),
        most=st.integers(1, 6),
        stop=st.booleans(),
        priority=st.integers(0, 1),
        share=st.sampled_from([None, None, "a", "b"]),
    )
    def add(self, prompt, n, more, salt, most, stop, priority, share):
        params = SamplingParams(
            n=n,
            best_of=n + more if more else None,
            max_tokens=most,
            seed=1,
            stop_token_ids=[1] if stop else None,
        )
        name = str(self.count)
        self.count += 1
        self.engine.add_request(
            name, prompt, params, priority=priority, share=share, cache_salt=salt
        )
        self.asked[name] = prompt, params

    @precondition(lambda self: self.asked.keys() - self.ended.keys())
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice):
        name = choice.choice(sorted(self.asked.keys() - self.ended.keys()))
        self.engine.abort_request(name)
        self.aborted.add(name)

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            before = self.engine._worker.computed
            self.take(self.engine.step())
            moved = self.engine._worker.computed - before
            assert moved <= 7, "the token budget"
            # Progress: with work to do, some step of any three computes.
            busy = bool(self.engine._requests) and not self.engine.is_paused()
            self.quiet = 0 if moved or not busy else self.quiet + 1
            assert self.quiet < 3, "nothing moves"
            check(self.engine)

    @precondition(lambda self: self.engine.config.cache.enable_prefix_caching)
    @rule(
        name=st.sampled_from(["a", "b"]),
        prefix=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([None, "x"]),
    )
    def pin(self, name, prefix, salt):
        with contextlib.suppress(OutOfMemoryError, EnginePausedError):
            self.engine.add_prefix(name, prefix, cache_salt=salt)

    @precondition(lambda self: self.engine.prefixes())
    @rule()
    def drop(self):
        self.engine.drop_prefix(self.engine.prefixes()[0].name)

    @rule()
    def forget(self):
        self.engine.reset_prefix_cache()

    @rule(mode=st.sampled_from(["wait", "abort", "keep"]), given=st.booleans())
    def update(self, mode, given):
        worker, before = self.engine._worker, self.engine.weights_version
        self.engine.start_weight_update()
        if not given:
            with pytest.raises(InvalidWeightsError):
                self.engine.finish_weight_update(mode)
            assert worker.version == self.engine.weights_version == before
            return
        self.engine.add_weights({"w": np.zeros(1)})
        live = self.engine._requests
        running = {n for n, r in live.items() if r.sequences[0].num_cached is not None}
        if mode == "wait" and running and self.engine.is_paused():
            with pytest.raises(EnginePausedError, match="keeps requests from finishing"):
                self.engine.finish_weight_update(mode)
            assert worker.version == self.engine.weights_version == before
            return
        if mode == "abort":
            self.aborted |= running
        elif mode == "keep":
            worker.keeping |= running
        version = self.engine.finish_weight_update(mode)
        assert version == worker.version == before + 1
        if mode == "keep":
            self.kept |= running
        else:
            assert not running & live.keys()
        check(self.engine)

    @invariant()
    def sound(self):
        if self.engine is not None:
            check(self.engine)

    def take(self, outputs):
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.ended, "one final output"
                self.ended[output.request_id] = output

    def teardown(self):
        if self.engine is None:
            return
        if self.engine.is_paused():
            self.engine.resume()
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.step(1)
        assert self.ended.keys() == self.asked.keys(), "every request ends"
        for name, (prompt, params) in self.asked.items():
            outputs = self.ended[name].outputs
            assert len(outputs) == params.n
            if name not in self.aborted:
                assert self.ended[name].num_cached_tokens < len(prompt)
            for completion in outputs:
                said, versions = completion.token_ids, completion.weights_versions
                indices = range(params.num_sequences) if params.best_of else [completion.index]
                assert any(said == spoken(prompt, index, versions) for index in indices)
                assert versions == sorted(versions)
                assert name in self.kept or len(set(versions)) <= 1
                if name not in self.aborted:
                    assert completion.finish_reason in ("stop", "length")
        used = self.engine._blocks.counts().used
        assert used == len(set(self.engine.pinned_pages()))
        assert self.engine._scheduler.host.num_used == 0
        assert self.engine._scheduler.host_states.num_used == 0
        if self.has_states:
            pinned = {p.state for p in self.engine.prefixes()} - {None}
            assert self.engine._scheduler.states.pool.counts().used == len(pinned)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=num_examples(60),
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)


class WindowsMachine(EngineMachine):
    """The same with page groups that have windows, with and without full attention beside them."""

    windows = ((None, 5), (None, 3, 3), (5,), (1,), (None, 2, 7), (4, 6, 6))


TestWindowsMachine = WindowsMachine.TestCase
TestWindowsMachine.settings = TestEngineMachine.settings


class StatesMachine(EngineMachine):
    """The same with layers that have a state in place of KV."""

    has_states = True


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = TestEngineMachine.settings
