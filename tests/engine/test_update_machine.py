"""A real engine whose weights are replaced, while it is paused, put to sleep and used, at random.

Every token is held to a plain forward pass with the weights that computed it.
"""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rjax.errors import (
    EnginePausedError,
    EngineSleepingError,
    InvalidWeightsError,
    OutOfMemoryError,
)
from rjax.outputs import token_chances
from rjax.sampling import RequestOutputKind, SamplingParams
from tests.properties import num_examples

from .invariants import check
from .mixed_weights import KvVersions, draw_scores, log_softmax, mixed_logits
from .test_update_weights import folder, weights
from .tiny import CONFIG, make_engine

CLOSE = 1e-3  # of logits; those of other weights differ by about 1
BASE = [3 + 7 * i % 89 for i in range(36)]
TENSORS = {seed: weights(CONFIG, seed) for seed in (1, 2, 3)}
PROMPTS = st.builds(
    lambda size, tail: BASE[:size] + tail,
    st.sampled_from([0, 9, 17, 36]),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
pytestmark = [
    pytest.mark.usefixtures("kept"),
    pytest.mark.usefixtures("no_annotations_checked"),
]

MODES = st.sampled_from(["keep", "keep", "wait", "abort"])
REQUESTS = st.lists(
    st.tuples(
        PROMPTS,
        st.integers(1, 2),
        st.integers(2, 12),
        st.sampled_from([0.0, 0.9]),
        st.sampled_from(list(RequestOutputKind)),
        st.sampled_from([None, "a", "b"]),
    ),
    max_size=3,
)
LOAD = st.tuples(REQUESTS, st.integers(0, 6), st.sampled_from([True, True, True, False]))


class UpdateMachine(RuleBasedStateMachine):
    """Requests, updates, pauses, sleeps and prefixes over a small pool.

    Attributes:
        engine: one for all examples, since programs are its own; each starts with the weights of
            seed 1, which are those of the checkpoint.
        usable: whether the last example left an engine that another can use.
    """

    folder: Path
    engine: Any = None
    seen: KvVersions
    usable = False

    @initialize()
    def start(self):
        kind = type(self)
        if not kind.usable:
            kind.engine = make_engine(
                self.folder, load_format="auto", dtype="float32", num_pages=24
            )
            kind.seen = KvVersions(kind.engine)
        kind.usable = False
        self.engine.sleep(2)
        self.engine.wake_up()
        self.seen.sampled.clear()
        self.tensors = {self.engine.weights_version: TENSORS[1]}
        self.open = None  # the tensors of an update that is not finished
        self.asked, self.ended, self.said, self.forwards, self.count = {}, {}, {}, {}, 0
        self.aborted, self.kept = set(), set()
        self.weights_dropped = False

    @property
    def now(self):
        """The weights in use."""
        return self.tensors[self.engine.weights_version]

    @rule(load=LOAD)
    def serve(self, load):
        self.run(load)

    def run(self, load):
        """Add requests, and step. They may end a pause or a sleep, so as not to wait."""
        requests, steps, wakes = load
        if requests and wakes:
            if self.engine.is_sleeping():
                self.wake_up(None)
            self.engine.resume()
        for request in requests:
            self.add(*request)
        self.step(steps)

    def add(self, prompt, n, most, temperature, kind, use):
        params = SamplingParams(
            n=n if temperature else 1,
            max_tokens=most,
            temperature=temperature,
            seed=self.count,
            logprobs=0,
            ignore_eos=True,
            output_kind=kind,
        )
        name = str(self.count)
        if self.engine.is_sleeping():
            with pytest.raises(EngineSleepingError):
                self.engine.add_request(name, prompt, params)
            return
        named = {prefix.name: prefix.token_ids for prefix in self.engine.prefixes()}
        use = use if use in named else None
        self.engine.add_request(name, prompt, params, prefix=use)
        self.asked[name] = [*named.get(use, ()), *prompt], params, self.engine.weights_version
        self.count += 1

    def step(self, count):
        for _ in range(count):
            self.take(self.engine.step())
            check(self.engine)

    @precondition(lambda self: self.asked.keys() - self.ended.keys())
    @rule(choice=st.integers(0, 5))
    def abort(self, choice):
        live = sorted(self.asked.keys() - self.ended.keys())
        name = live[choice % len(live)]
        self.engine.abort_request(name)
        self.aborted.add(name)

    @rule(
        seed=st.sampled_from([1, 2, 3]),
        mode=MODES,
        what=st.sampled_from(["whole", "part", "buckets", "open", "open part", "cancelled"]),
        load=LOAD,
        after=LOAD,
    )
    def update(self, seed, mode, what, load, after):
        self.run(load)
        engine, before = self.engine, self.engine.weights_version
        if self.open is not None:
            with pytest.raises(InvalidWeightsError, match="is under way"):
                engine.start_weight_update()
            return
        given = TENSORS[seed]
        if "part" in what:
            given = {name: given[name] for name in sorted(given)[seed::3]}
        engine.start_weight_update(partial="part" in what)
        items = list(given.items())
        if what == "buckets":
            for first in range(0, len(items), 7):
                engine.add_weights(items[first : first + 7])
        else:
            engine.add_weights(items[:4] if what == "cancelled" else given)
        if what == "cancelled":
            engine.cancel_weight_update()
        elif what.startswith("open"):
            self.open = given
        else:
            self.finish(mode, given)
        assert engine.weights_version in (before, before + 1)
        self.run(after)

    @precondition(lambda self: self.open is not None)
    @rule(mode=MODES, cancel=st.booleans(), whole=st.booleans())
    def finish_open(self, mode, cancel, whole):
        given = self.open
        if cancel:
            self.engine.cancel_weight_update()
            self.open = None
        else:
            self.finish(mode, given, whole=whole)

    def finish(self, mode, given, *, whole=True):
        """Finish an update, or only try to, which leaves it open while requests run."""
        engine, before = self.engine, self.engine.weights_version
        live = engine._requests
        running = {n for n, r in live.items() if r.sequences[0].num_cached is not None}
        refused = None
        if "weights" in engine._state.asleep:
            refused = EngineSleepingError
        elif mode == "wait" and running and (engine.is_sleeping() or self.frozen()):
            refused = EnginePausedError
        self.open = None
        if refused is not None:
            with pytest.raises(refused):
                engine.finish_weight_update(mode)
            assert engine.weights_version == before
            return
        self.tensors[before + 1] = {**self.now, **given}
        version = (engine.finish_weight_update if whole else engine.try_finish_weight_update)(mode)
        if version is None:
            assert mode == "wait"
            assert running
            assert engine.weights_version == before
            self.open = given
            return
        assert version == engine.weights_version == before + 1
        assert not engine.pinned_pages(), "prefixes with KV of before"
        if mode == "abort":
            self.aborted |= running & self.asked.keys()
        if mode == "keep":
            self.kept |= running
        else:
            assert not running & live.keys()

    def frozen(self):
        return self.engine._state.mode == "keep"

    @rule(
        how=st.sampled_from(["NaN", "shape", "missing", "unknown", "killed", "twice", "mode"]),
        seed=st.sampled_from([2, 3]),
    )
    def wrong_update(self, how, seed):
        engine, before = self.engine, self.engine.weights_version
        if self.open is not None:
            return
        given, name = dict(TENSORS[seed]), "model.layers.1.mlp.down_proj.weight"

        def killed():
            yield from list(given.items())[:5]
            raise RuntimeError("the trainer was killed")

        match how:
            case "NaN":
                given[name] = np.full_like(given[name], np.nan)
            case "shape":
                given[name] = given[name].T
            case "missing":
                del given[name]
            case "unknown":
                given["model.layers.2.mlp.down_proj.weight"] = given[name]
        cached = dict(engine._blocks._page_of)
        engine.start_weight_update()

        def send():
            engine.add_weights(killed() if how == "killed" else given)
            if how == "twice":
                engine.add_weights({name: given[name]})
            engine.finish_weight_update("at once" if how == "mode" else "keep")

        with pytest.raises((RuntimeError, InvalidWeightsError, EngineSleepingError)):
            send()
        with pytest.raises(InvalidWeightsError, match="no update of the weights is under way"):
            engine.add_weights(given)
        assert engine.weights_version == before
        assert engine._blocks._page_of == cached

    @rule(mode=MODES, load=LOAD)
    def pause(self, mode, load):
        self.run(load)
        if self.engine.is_sleeping() and mode == "wait":
            return
        if mode == "abort":
            self.aborted |= self.asked.keys() & self.engine._requests.keys()
        self.engine.pause(mode)
        for _ in range(300):
            if not self.engine.is_draining():
                break
            self.step(1)
        assert not self.engine.is_draining()

    @rule()
    def resume(self):
        if self.engine.is_sleeping():
            with pytest.raises(EngineSleepingError):
                self.engine.resume()
        else:
            self.engine.resume()

    @rule(
        level=st.sampled_from([1, 2]),
        load=LOAD,
        wake=st.sampled_from([[], [None], [["weights"]], [["weights"], ["kv_cache"]]]),
    )
    def sleep(self, level, load, wake):
        self.run(load)
        engine = self.engine
        names = [prefix.name for prefix in engine.prefixes()]
        engine.sleep(level)
        self.weights_dropped |= level == 2
        assert [prefix.name for prefix in engine.prefixes()] == names
        counts = engine._blocks.counts()
        assert counts.free == counts.total
        for tags in wake:
            self.wake_up(tags)

    @precondition(lambda self: self.engine.is_sleeping())
    @rule(tags=st.sampled_from([None, ["weights"], ["kv_cache"]]))
    def wake_up(self, tags):
        engine, before = self.engine, self.engine.weights_version
        engine.wake_up(tags)
        assert engine.is_sleeping() == bool(engine._state.asleep)
        if tags != ["kv_cache"] and self.weights_dropped:
            self.weights_dropped = False
            assert engine.weights_version == before + bool(before)
            self.tensors[engine.weights_version] = TENSORS[1]
        assert engine.weights_version == before or self.now is TENSORS[1]

    @rule(name=st.sampled_from(["a", "b"]), size=st.sampled_from([5, 8, 20]))
    def add_prefix(self, name, size):
        with contextlib.suppress(OutOfMemoryError, EnginePausedError, EngineSleepingError):
            self.engine.add_prefix(name, BASE[:size])
            assert name in {prefix.name for prefix in self.engine.prefixes()}

    @precondition(lambda self: self.engine.prefixes())
    @rule()
    def drop_prefix(self):
        self.engine.drop_prefix(self.engine.prefixes()[0].name)

    @rule()
    def reset_prefix_cache(self):
        self.engine.reset_prefix_cache()
        assert self.engine._blocks.counts().cached == 0

    @invariant()
    def sound(self):
        if hasattr(self, "tensors"):
            check(self.engine)

    def take(self, outputs):
        for output in outputs:
            assert output.request_id in self.asked, "an output of a request that nobody made"
            if output.finished:
                assert output.request_id not in self.ended, "one final output"
                self.ended[output.request_id] = output
            if self.asked[output.request_id][1].output_kind is RequestOutputKind.DELTA:
                for said in output.outputs:
                    parts = self.said.setdefault((output.request_id, said.index), ([], [], []))
                    new = said.token_ids, said.weights_versions, chosen(said)
                    for part, more in zip(parts, new, strict=True):
                        part += more

    def teardown(self):
        if not hasattr(self, "tensors"):
            return
        engine = self.engine
        engine.cancel_weight_update()
        if engine.is_sleeping():
            self.wake_up(None)
        engine.resume()
        for _ in range(2000):
            if not engine.has_unfinished_requests():
                break
            self.step(1)
        assert self.ended.keys() == self.asked.keys(), "every request ends"
        for name in self.asked:
            self.check_answer(name)
        for prefix in engine.prefixes():
            engine.drop_prefix(prefix.name)
        engine.reset_prefix_cache()
        assert engine._blocks.counts().free == engine._worker.pool.num_pages, "pages leak"
        assert engine._scheduler.host.num_used == 0
        assert not engine._requests
        assert not engine._prefixes.pending
        type(self).usable = True

    def check_answer(self, name):
        """Each token is the one that the weights of its version choose, after KV of versions that
        it may see; its log-probability is theirs."""
        prompt, params, oldest = self.asked[name]
        for said in self.ended[name].outputs:
            if params.output_kind is RequestOutputKind.DELTA:
                parts = self.said.get((name, said.index), ([], [], []))
                tokens, versions, logprobs = parts
            else:
                tokens, versions, logprobs = said.token_ids, said.weights_versions, chosen(said)
            assert len(tokens) == len(versions) == len(logprobs)
            assert said.finish_reason == "length" or name in self.aborted
            assert len(tokens) == params.max_tokens or name in self.aborted
            every, first = [*prompt, *tokens], len(prompt)
            ways = [self.seen.sampled[name, said.index, first + i] for i in range(len(tokens))]
            for number, (token, how) in enumerate(zip(tokens, ways, strict=True)):
                assert versions[number] == how.version
                if name not in self.kept:
                    assert set(how.context) == {how.version}, "KV of other weights"
                assert min(how.context) >= oldest, "KV from before the request"
                assert max(how.context) <= how.version
                if how.context[-1] != how.version:
                    continue  # its KV was cached, and its logits are of newer weights
                size = first + number
                later = ways[-1].context
                context = later if later[:size] == how.context else how.context
                logits = self.logits(tuple(every[: len(context)]), context)[size - 1]
                assert abs(log_softmax(logits)[token] - logprobs[number]) < CLOSE
                scores = draw_scores(logits, params.temperature, params.seed, said.index, number)
                assert scores[token] > scores.max() - CLOSE
            self.forwards.clear()

    def logits(self, tokens, context):
        if (tokens, context) not in self.forwards:
            found = mixed_logits(CONFIG, self.tensors, tokens, context)
            self.forwards[tokens, context] = found
        return self.forwards[tokens, context]


def chosen(said):
    """Log-probabilities of the tokens of an output."""
    return [entry[0][1] for entry in token_chances(said.logprobs)]


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory):
    """The checkpoint of the engines."""
    UpdateMachine.folder = folder(tmp_path_factory.mktemp("machine") / "model", CONFIG)
    yield
    UpdateMachine.usable = False
    UpdateMachine.engine = LongUpdateMachine.engine = None


class LongUpdateMachine(UpdateMachine):
    """The same for longer, with more examples."""


TestUpdateMachine = UpdateMachine.TestCase
TestUpdateMachine.settings = settings(
    max_examples=num_examples(120),
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLongUpdateMachine = pytest.mark.slow(LongUpdateMachine.TestCase)
TestLongUpdateMachine.settings = settings(
    TestUpdateMachine.settings, max_examples=600, stateful_step_count=40
)
