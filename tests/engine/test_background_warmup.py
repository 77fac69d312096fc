"""Compiling in the background: requests are served meanwhile, and nothing is compiled after it."""

import collections
import dataclasses
import math
import threading
import time
from typing import Any

import jax
import pytest

from rjax.batch.compile_progress import COMPILE_THREAD
from rjax.sampling import SamplingParams
from rjax.worker import worker as worker_module
from rjax.worker.programs.keys import step_key
from rjax.worker.programs.warmup import warmup_keys

from .tiny import make_engine, run

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6),
    "random": SamplingParams(temperature=0.8, seed=1, max_tokens=6),
    "full": SamplingParams(temperature=0.8, top_k=9, presence_penalty=0.5, seed=2, max_tokens=6),
    "logprobs": SamplingParams(temperature=0, logprobs=2, max_tokens=6),
}
REQUESTS = [
    (f"{name} {i}", [5 + i] * length, params)
    for name, params in PARAMS.items()
    for i, length in enumerate((1, 3, 40))
]


PROMPT_REQUESTS = [
    (f"{name} {length}", [4 + i for i in range(length)], dataclasses.replace(p, prompt_logprobs=1))
    for name, p in PARAMS.items()
    for length in (1, 3, 40)
]


def answers(outputs):
    return {key: output.outputs[0].token_ids for key, output in outputs.items()}


def same_logprobs(found, expected) -> None:
    """Up to the order of float32 sums, which differs between step sizes."""
    assert len(found) == len(expected)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert one.keys() == other.keys()
        for token, logprob in one.items():
            assert logprob.rank == other[token].rank
            assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def wait_until_compiled(engine) -> None:
    while (progress := engine.compile_progress()).compiled < progress.total:
        time.sleep(0.02)


class Compilations(collections.Counter[str]):
    """Programs that XLA compiles while it listens."""

    def __call__(self, event: str, duration_secs: float, **labels: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            self[str(labels.get("fun_name"))] += 1


@pytest.fixture(autouse=True)
def _threads_end():
    """A thread that compiles uses Python's random numbers, which other tests watch."""
    yield
    for thread in threading.enumerate():
        if thread.name == COMPILE_THREAD:
            thread.join()


@pytest.fixture
def compilations():
    found = Compilations()
    jax.monitoring.register_event_duration_secs_listener(found)
    yield found
    jax.monitoring.unregister_event_duration_listener(found)


@pytest.mark.thorough
def test_requests_are_served_while_other_sizes_compile(tiny):
    expected = answers(run(make_engine(tiny), REQUESTS))
    engine = make_engine(tiny, warmup="background", num_pages=25)  # a size nobody compiled
    planned = engine.compile_progress().total
    first = run(engine, REQUESTS[:1])
    progress = engine.compile_progress()
    assert 0 < progress.compiled < planned
    assert progress.waited_seconds() > 0
    assert answers(first | run(engine, REQUESTS[1:])) == expected
    wait_until_compiled(engine)
    assert answers(run(engine, REQUESTS)) == expected
    engine.close()


# test_auto_decode_steps.py compiles programs of several steps in the background.
@pytest.mark.slow
@pytest.mark.parametrize("decode_steps", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_compiled_after_the_background_is_done(tiny, compilations, decode_steps):
    options = {"num_pages": 26 + decode_steps, "swap_space": "1MiB"}
    engine = make_engine(tiny, warmup="background", num_decode_steps=decode_steps, **options)
    wait_until_compiled(engine)
    compilations.clear()
    run(engine, REQUESTS)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    many = [(str(i), [7 + i] * 30, long) for i in range(16)]
    run(engine, many)
    assert engine.stats().preemptions > 0
    assert not compilations
    assert engine.compile_progress().waited_seconds() == 0
    engine.close()


@pytest.mark.thorough
def test_a_larger_size_says_the_same(tiny):
    engine = make_engine(tiny)
    expected = answers(run(engine, REQUESTS))
    worker: Any = make_engine(tiny)._worker
    for size in range(1, len(worker.shapes.all)):
        engine = make_engine(tiny)
        worker = engine._worker
        kept = worker.shapes.all[size:]
        fitting = worker.shapes.fitting

        def larger(*, rows, seqs, kept=kept, fitting=fitting):
            return [shape for shape in fitting(rows=rows, seqs=seqs) if shape in kept]

        worker.shapes.fitting = larger
        assert answers(run(engine, REQUESTS)) == expected
    assert engine.stats().steps > 0


@pytest.mark.slow
def test_prompt_logprobs_wait_for_no_program(tiny, monkeypatch):
    """Those of the largest step serve smaller ones, whose own are compiled meanwhile."""
    monkeypatch.setattr(worker_module, "_CPU_PADDING", math.inf)
    expected = run(make_engine(tiny), PROMPT_REQUESTS)
    engine = make_engine(tiny, warmup="background", num_pages=28)
    wait_until_compiled(engine)
    planned = engine.compile_progress().total
    for _ in range(2):
        for request in PROMPT_REQUESTS:
            [(name, found)] = run(engine, [request]).items()
            assert found.outputs[0].token_ids == expected[name].outputs[0].token_ids
            same_logprobs(found.prompt_logprobs, expected[name].prompt_logprobs)
        assert engine.compile_progress().total > planned
        wait_until_compiled(engine)
    assert engine.compile_progress().waited_seconds() == 0
    engine.close()


def test_the_largest_step_comes_first_and_every_program_once(tiny):
    worker: Any = make_engine(tiny)._worker
    decode = worker.shapes.decode
    keys = warmup_keys(
        worker.shapes,
        ("greedy", "random", "full"),
        num_decode_steps=4,
        num_logprobs=3,
        spare_rows=decode[1].rows,
    )
    steps = [key.shape for key in keys if key.kind == "step"]
    assert steps[:3] == [worker.shapes.largest, *decode[:2]]
    [prompt] = [key for key in keys if key.kind == "prompt_logprobs"]
    assert prompt.shape == worker.shapes.largest
    assert keys.index(prompt) < keys.index(step_key(steps[3]))
    assert len(set(keys)) == len(keys)
    assert {key.shape for key in keys if key.kind == "step"} == set(worker.shapes.all)


def test_a_deleted_engine_compiles_nothing_more(tiny):
    engine = make_engine(tiny, warmup="background", num_pages=27)
    compiler = engine._worker._background.compiler
    del engine
    assert compiler._closed
