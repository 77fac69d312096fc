"""The same greedy tokens whatever the engine does meanwhile: batch, chunks, preemption, cache."""

import gc
import random
import sys

import numpy as np
import pytest

from rjax.sampling import SamplingParams

from .fake_worker import FakeWorker, fake_engine
from .invariants import check
from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("no_annotations_checked", "kept")


def requests(count: int, seed: int):
    """Greedy requests over nested beginnings, some of them equal, with stops."""
    rng = np.random.default_rng(seed)
    stems = [[]]
    for size in (13, 24, 9, 30):
        stems.append(stems[rng.integers(len(stems))] + rng.integers(0, VOCAB, size).tolist())
    found = []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 20)).tolist()
        params = SamplingParams(
            temperature=0,
            max_tokens=int(rng.integers(1, 20)),
            stop_token_ids=[int(rng.integers(VOCAB))],
        )
        found.append((f"r{i}", stems[rng.integers(len(stems))] + own, params))
    return found


def repeated(asked, times: int):
    """Each request so many times, under names of their own."""
    return [(f"{name}/{i}", *rest) for name, *rest in asked for i in range(times)]


def alone(tiny, asked):
    engine = make_engine(tiny, enable_prefix_caching=False, enable_relay_attention="off")
    return {r[0]: run(engine, [r])[r[0]].outputs[0].token_ids for r in asked}


def shuffled(engine, asked, seed: int):
    """Tokens of all requests, added in random order at random steps, warm or cold."""
    rng = random.Random(seed)
    waiting = rng.sample(asked, len(asked))
    done = {}
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 3, 12])):
            if waiting:
                name, tokens, params = waiting.pop()
                engine.add_request(name, tokens, params, priority=rng.randrange(3))
        for output in engine.step():
            done[output.request_id] = output.outputs[0].token_ids
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
    return done


SETTINGS = [
    {"num_pages": 24, "preemption": "swap", "enable_relay_attention": "on"},
    {"num_pages": 24, "preemption": "recompute", "max_num_batched_tokens": 16},
    {"num_pages": 24, "preemption": "swap", "enable_prefix_caching": False},
    {"num_pages": 64, "preemption": "auto", "max_num_batched_tokens": 64},
    {"num_pages": 24, "preemption": "swap", "page_size": 16, "enable_relay_attention": "off"},
]


@pytest.mark.parametrize(
    ("count", "times", "settings"),
    [(30, 4, SETTINGS[:2]), pytest.param(300, 1, SETTINGS, marks=pytest.mark.slow)],
    ids=["quick", "long"],
)
def test_tokens_are_those_of_each_request_alone(tiny, count, times, settings):
    different = requests(count, 0)
    found = alone(tiny, different)
    asked = repeated(different, times)
    want = {name: found[name.split("/")[0]] for name, *_ in asked}
    seen = dict.fromkeys(("preemptions", "swaps", "pages_copied", "cached_tokens"), 0)
    for seed, options in enumerate(settings):
        engine = make_engine(tiny, **options)
        for again in range(2):  # cold, then warm
            assert shuffled(engine, asked, 2 * seed + again) == want, options
            assert engine._blocks.counts().used == 0
        stats = engine.stats()
        for name in seen:
            seen[name] += getattr(stats, name)
        if options.get("enable_relay_attention") == "on":
            assert stats.kv_tokens_read < stats.kv_tokens_unshared
    assert all(seen.values()), seen


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_samples_survive_preemption(tiny, preemption):
    """Samples of one prompt share pages, are preempted, and say what they would have said."""
    params = SamplingParams(n=4, seed=3, max_tokens=24)
    asked = [(str(i), [i] * 21, params) for i in range(3)]
    roomy = make_engine(tiny, num_pages=64)
    want = run(roomy, asked)
    assert roomy.stats().preemptions == 0
    engine = make_engine(tiny, num_pages=24, preemption=preemption)
    got = run(engine, asked)
    for name in want:
        assert [o.token_ids for o in got[name].outputs] == [o.token_ids for o in want[name].outputs]
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.swaps > 0) == (preemption == "swap")
    assert stats.pages_copied > 0
    assert sum(o.metrics.num_preemptions for o in got.values()) == stats.preemptions


@pytest.mark.thorough
def test_nothing_is_leaked():
    """Many requests with random aborts: every page comes back, and host memory stays flat."""
    engine = fake_engine(
        num_pages=40,
        page_size=4,
        vocab=5,
        host=30,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption="swap",
    )
    worker = engine._worker
    assert isinstance(worker, FakeWorker)
    rng = random.Random(0)
    count = 4_000
    live: set[str] = set()
    sizes = []
    for i in range(count):
        prompt = [rng.randrange(5)] * rng.randrange(1, 30)
        params = SamplingParams(n=rng.choice([1, 1, 2]), max_tokens=rng.randrange(1, 20), seed=i)
        engine.add_request(str(i), prompt, params, timeout=1000.0)
        live.add(str(i))
        for _ in range(3):
            live -= {o.request_id for o in engine.step() if o.finished}
        if rng.random() < 0.3 and live:
            engine.abort_request(rng.choice(sorted(live)))
        while len(live) > 20:
            live -= {o.request_id for o in engine.step() if o.finished}
        if i % (count // 10) == 0:
            check(engine)
            live -= {name for name in live if name not in engine._requests}
            worker.truth = {
                s: t for s, t in worker.truth.items() if s.request_id in engine._requests
            }
            gc.collect()
            sizes.append(sys.getallocatedblocks())
    run(engine, [])
    assert engine._blocks.counts().used == 0
    assert engine._scheduler.host.num_used == 0
    assert engine.stats().preemptions > 0
    assert max(sizes[5:]) < max(sizes[2:5]) + 3000, sizes
    assert len(engine._deadlines) <= 2 * 20 + 65
