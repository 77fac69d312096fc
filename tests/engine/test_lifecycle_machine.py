"""The engine over a fake worker that is paused, resumed, put to sleep and woken up at random."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from rjax.errors import EngineSleepingError
from rjax.sampling import SamplingParams
from tests.properties import num_examples

from .invariants import check
from .test_scheduler_machine import GREEDY, EngineMachine

pytestmark = pytest.mark.usefixtures("no_annotations_checked")

LOAD = st.tuples(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), max_size=3), st.integers(1, 4)
)


class LifecycleMachine(EngineMachine):
    """Requests and prefixes as in `EngineMachine`, whose tokens no pause and no sleep changes."""

    @rule(mode=st.sampled_from(["abort", "wait", "keep"]), load=LOAD)
    def pause(self, mode, load):
        engine = self.engine
        self.run(load)
        started = {name for name, r in engine._requests.items() if r.has_started}
        live = self.asked.keys() & engine._requests.keys()
        computed = engine._worker.computed
        engine.pause(mode)
        for _ in range(200):
            if not engine.is_draining():
                break
            self.take(engine.step())
            check(engine)
        assert not engine.is_draining() and engine.is_paused()
        left = self.asked.keys() & engine._requests.keys()
        match mode:
            case "abort":
                self.aborted |= live
                assert not engine._requests
            case "wait":  # those that had pages have finished; no other has got any
                assert left == live - started
                assert not engine._scheduler.running
            case "keep":  # the steps in flight are read, which may end a request
                assert left == live - self.ended.keys()
        assert engine._worker.computed == computed or mode == "wait"
        computed = engine._worker.computed
        self.take(engine.step())
        assert engine._worker.computed == computed

    @rule()
    def resume(self):
        self.engine.resume()
        assert not self.engine.is_paused()

    @rule(
        level=st.sampled_from([1, 2]),
        tags=st.sampled_from([[None], [["weights"], ["kv_cache"]], [["kv_cache"], None]]),
        again=st.booleans(),
        abort=st.booleans(),
        load=LOAD,
    )
    def sleep(self, level, tags, again, abort, load):
        engine = self.engine
        self.run(load)
        was_paused, names = engine.is_paused(), [p.name for p in engine.prefixes()]
        engine.sleep(level)
        if level == 2 and engine.weights_version:  # it wakes up with those of the start
            self.kept |= engine._requests.keys()
        if again:
            engine.sleep(level)
        counts = engine._blocks.counts()
        assert counts.free == counts.total
        assert engine._scheduler.host.num_used == 0
        if engine._scheduler.states is not None:
            assert engine._scheduler.states.pool.counts().free
        assert [p.name for p in engine.prefixes()] == names
        assert not engine.pinned_pages()
        with pytest.raises(EngineSleepingError, match="call wake_up first"):
            engine.add_request("asleep", [1], GREEDY)
        if abort and (live := sorted(self.asked.keys() - self.ended.keys())):
            engine.abort_request(live[0])
            self.aborted.add(live[0])
        while engine.is_draining():
            self.take(engine.step())
        with pytest.raises(EngineSleepingError, match="weights sleep"):
            self.update("keep", given=True)
        for some in tags:
            assert engine.is_sleeping() and engine.is_paused()
            check(engine)
            engine.wake_up(some)
        assert not engine.is_sleeping()
        assert engine.is_paused() == was_paused
        for prefix in engine.prefixes():  # the first request that starts with it fills it again
            self.request([*prefix.token_ids, 0], cache_salt=prefix.cache_salt)
        if not was_paused:
            self.step(3)

    def run(self, load):
        """Add a prefix and requests, and run some steps, unless the engine stays paused."""
        prompts, steps = load
        if not prompts:
            return
        self.engine.resume()
        if self.engine.config.cache.enable_prefix_caching:
            self.pin("a", prompts[0], None)
        for prompt in prompts:
            self.request(prompt)
        self.step(steps)

    def request(self, prompt, **options):
        params = SamplingParams(n=2, max_tokens=4, seed=1)
        name = str(self.count)
        self.count += 1
        self.engine.add_request(name, prompt, params, **options)
        self.asked[name] = prompt, params


class StatesMachine(LifecycleMachine):
    """The same with layers that have a state in place of KV."""

    has_states = True


class WindowsMachine(LifecycleMachine):
    """The same with page groups that have windows."""

    windows = ((None, 5), (5,), (None, 2, 7))


TestLifecycleMachine = LifecycleMachine.TestCase
TestLifecycleMachine.settings = settings(
    EngineMachine.TestCase.settings, max_examples=num_examples(32), stateful_step_count=20
)
TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = TestLifecycleMachine.settings
TestWindowsMachine = WindowsMachine.TestCase
TestWindowsMachine.settings = TestLifecycleMachine.settings
