"""``num_decode_steps`` "auto": the tokens are the same whatever it decides, and when it may.

The times by which it decides are tested in test_multi_step_policy.py.
"""

import dataclasses
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from rjax.build import engine_builder
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.worker.programs import warmup
from rjax.worker.step.multi_step_policy import MAX_PROGRAM_SECONDS, MultiStepPolicy
from rjax.worker.step.runner import StepRunner
from tests.properties import num_examples

from .test_background_warmup import wait_until_compiled
from .test_decode_steps import AT_ONCE, requests, tokens
from .tiny import VOCAB, dense, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")


class Drawn(MultiStepPolicy):
    """A policy that decides by lot, and what it was told."""

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__(AT_ONCE)
        self.share = share
        self.draw = np.random.default_rng(seed)
        self.told: list[int] = []
        self.serves_streams = True

    def pays(self, key, *, streams):
        assert key.kind == "multi_step"
        serves = self.serves_streams or not streams
        return serves and bool(self.draw.random() < self.share)

    def read(self, program, *, late):
        self.told.append(program.num_steps)
        super().read(program, late=late)


@pytest.fixture
def decides(monkeypatch):
    """Has engines made from here on decide by this policy."""

    def use(policy: MultiStepPolicy) -> MultiStepPolicy:
        monkeypatch.setattr(engine_builder, "multi_step_policy", lambda config, platform: policy)
        return policy

    return use


def whole(given, streams=()):
    """The requests without streaming, except those of these names."""
    return [
        (
            name,
            prompt,
            params
            if name in streams
            else dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY),
        )
        for name, prompt, params in given
    ]


# The property below has what decides it at random.
@pytest.mark.slow
@pytest.mark.parametrize(("pages", "share"), [(64, 1.0), (24, 0.8)])
def test_the_tokens_do_not_depend_on_what_is_decided(tiny, decides, pages, share):
    given = whole(requests(pages))
    expected = tokens(run(make_engine(tiny, num_pages=pages), given))
    policy = decides(Drawn(share))
    engine = make_engine(tiny, num_pages=pages)
    for _ in range(2 if share < 1 else 1):
        assert tokens(run(engine, given)) == expected
        stats = engine.stats()
        assert stats.num_decode_steps == AT_ONCE
        assert 0 < stats.multi_steps < stats.steps
        assert stats.multi_steps % AT_ONCE == 0
        assert set(policy.told) == ({AT_ONCE} if share == 1 else {1, AT_ONCE})
        engine.reset_prefix_cache()
        assert engine.stats().kv_bytes_used == 0


@pytest.fixture(scope="module")
def by_lot(tiny):
    """An engine and the policy that draws for it, and the model's logits by a plain forward."""
    policy = Drawn(1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_builder, "multi_step_policy", lambda config, platform: policy)
        engine = make_engine(tiny)
    return engine, policy, dense(tiny)


@hypothesis.given(
    share=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 1000),
    arrivals=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 25), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    aborts=st.dictionaries(st.integers(3, 40), st.integers(0, 5), max_size=2),
)
@hypothesis.settings(max_examples=num_examples(15))
def test_any_choice_gives_the_tokens_of_one_sequence_alone(by_lot, share, seed, arrivals, aborts):
    """Against the plain model, with requests that arrive, stream, stop and are aborted."""
    engine, policy, model = by_lot
    policy.share, policy.draw = share, np.random.default_rng(seed)
    engine.reset_prefix_cache()
    rng = np.random.default_rng(seed)
    done, prompts = {}, {}
    for visit in range(10_000):
        for time, limit, length, streams in arrivals:
            if time != visit:
                continue
            name = str(len(prompts))
            prompts[name] = rng.integers(0, VOCAB, length).tolist()
            params = SamplingParams(
                temperature=0,
                max_tokens=limit,
                stop_token_ids=[int(rng.integers(VOCAB))],
                output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(name, prompts[name], params)
            done[name] = []
        if visit in aborts:
            engine.abort_request(str(aborts[visit]))
        if not engine.has_unfinished_requests() and visit > 30:
            break
        for output in engine.step():
            done[output.request_id] += output.outputs[0].token_ids
    for name, prompt in prompts.items():
        sequence = list(prompt)
        for token in done[name]:
            assert token == int(np.argmax(model(sequence)[-1]))
            sequence.append(token)
        assert done[name] or int(name) in aborts.values()


def test_a_stream_has_each_token_of_a_program(tiny, decides):
    decides(Drawn(1.0))
    engine = make_engine(tiny)
    params = SamplingParams(
        temperature=0, max_tokens=10, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    engine.add_request("a", [1, 2, 3], params)
    found = []
    while engine.has_unfinished_requests():
        found += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert found == [1] * 10
    assert engine.stats().multi_steps > 0


@pytest.mark.slow
def test_a_stream_and_a_waiting_request_get_single_steps(tiny, decides):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    decides(Drawn(1.0)).serves_streams = False
    alone = [("a", [1, 2, 3], params), ("b", [4, 5], params)]
    for some, options in (
        (whole(alone, streams=["b"]), {}),
        (whole(alone), {"max_num_seqs": 1, "max_num_prefill_ahead": 0}),
        (whole(alone), {"max_num_seqs": 1, "max_num_prefill_ahead": 1}),
    ):
        engine = make_engine(tiny, **options)
        for request in some:
            engine.add_request(*request)
        for _ in range(15):
            engine.step()
        assert engine.stats().multi_steps == 0
        while engine.has_unfinished_requests():
            engine.step()
    assert engine.stats().multi_steps > 0  # of the last one alone


def test_an_arrival_ends_the_groups(tiny, decides):
    decides(Drawn(1.0))
    engine = make_engine(tiny)
    final = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind=final)
    engine.add_request("a", [1, 2, 3], params)
    for _ in range(4):
        engine.step()
    before = engine.stats().steps
    engine.add_request("b", [4, 5], dataclasses.replace(params, max_tokens=1))
    engine.step()
    assert engine.stats().steps == before + 1  # its prompt, in the next step
    [output] = [output for _ in range(2) for output in engine.step() if output.request_id == "b"]
    assert output.finished


@pytest.mark.thorough
def test_nothing_is_measured_where_it_says_nothing(tiny, decides):
    """Steps with prompts or logprobs, and those of an incomplete group."""
    policy = decides(Drawn(1.0))
    engine = make_engine(tiny)
    given = [("a", [1] * 9, SamplingParams(temperature=0, max_tokens=3, logprobs=1))]
    run(engine, whole(given))
    run(engine, whole([("b", [1] * 9, SamplingParams(temperature=0, max_tokens=AT_ONCE))]))
    assert policy.told == []
    assert engine.stats().multi_steps == 0


@pytest.mark.slow
def test_a_warm_up_compiles_what_is_short(tiny, decides, monkeypatch):
    few = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "warmup": "on"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for compiles in (False, True):

        def is_short(runner, state, shape, seconds, *, compiles=compiles) -> bool:
            assert seconds == MAX_PROGRAM_SECONDS / AT_ONCE  # of one step
            return compiles

        monkeypatch.setattr(warmup, "_is_short", is_short)
        policy = decides(Drawn(1.0))
        monkeypatch.setattr(
            policy, "pays", lambda key, *, streams, policy=policy: key in policy._allowed
        )
        engine = make_engine(tiny, **few)
        assert bool(policy._allowed) == compiles
        compiled = engine._worker.num_compiled
        run(engine, whole([(str(i), [i + 1, 2], params) for i in range(3)]))
        assert engine._worker.num_compiled == compiled
        assert bool(engine.stats().multi_steps) == compiles


@pytest.mark.parametrize(
    ("host", "device", "short"),
    [(0.001, 0.01, True), (0.001, 0.1, False), (0.1, 0.01, True), (0.1, 0.2, False)],
)
def test_a_step_is_short_on_the_device_or_beside_the_hosts_work(
    tiny, monkeypatch, host, device, short
):
    """It takes the device at most 0.05 s, or less than the host takes to dispatch it."""
    now, done = [0.0], [0.0]

    class Runner(StepRunner):
        def __init__(self, worker) -> None:
            self.layouts = worker._runner.layouts

        def run(self, *_):
            now[0] += host
            done[0] = max(done[0], now[0]) + device

    def wait(_) -> None:
        now[0] = max(now[0], done[0])

    worker = make_engine(tiny)._worker
    runner, shape = Runner(worker), worker.shapes.decode[0]
    monkeypatch.setattr(warmup, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(warmup.jax, "block_until_ready", wait)
    assert warmup._is_short(runner, worker._state, shape, 0.05) == short


@pytest.mark.slow
def test_programs_of_a_small_model_are_in_the_plan(tiny, decides):
    decides(Drawn(1.0))
    engine = make_engine(tiny, warmup="background", num_pages=28)
    wait_until_compiled(engine)
    planned = engine.compile_progress().total
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    run(engine, whole([("a", [1, 2, 3], params)]))
    assert engine.stats().multi_steps > 0
    assert engine.compile_progress().total == planned
    engine.close()


@pytest.mark.slow
def test_the_background_compiles_what_pays(tiny, decides, monkeypatch):
    policy = decides(Drawn(1.0))
    monkeypatch.setattr(policy, "pays_to_compile", lambda key: len(policy.told) > 10)
    monkeypatch.setattr("rjax.worker.worker.may_pay", lambda *_: False)  # a large model
    engine = make_engine(tiny, warmup="background", num_pages=28)
    wait_until_compiled(engine)
    planned = engine.compile_progress().total
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    run(engine, whole([("a", [1, 2, 3], params)]))
    assert engine.compile_progress().total == planned
    run(engine, whole([("b", [1, 2, 3], params)]))
    assert engine.compile_progress().total == planned + 1
    wait_until_compiled(engine)
    before = engine.stats().multi_steps
    run(engine, whole([("c", [1, 2, 3], params)]))
    assert engine.stats().multi_steps > before
    assert engine.compile_progress().total == planned + 1
    engine.close()
