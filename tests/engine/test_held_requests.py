"""A request whose programs are being compiled is held, and the others go on."""

import dataclasses
import math
import threading
import time

import pytest

from rjax.sampling import SamplingParams
from rjax.worker import worker as worker_module
from rjax.worker.programs.cache import CompiledPrograms

from .fake_worker import fake_engine
from .test_background_warmup import same_logprobs, wait_until_compiled
from .tiny import make_engine, run

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
SCORED = dataclasses.replace(GREEDY, max_tokens=2, prompt_logprobs=2)


@pytest.fixture
def engine():
    """One in which a request runs, and the programs of "held" are missing."""
    engine = fake_engine(num_pages=100, vocab=97, max_model_len=64)
    engine._worker.compiling.add("held")
    engine.add_request("runs", [4, 5], GREEDY)
    engine.step()
    return engine


def finished(engine, steps: int = 200) -> dict[str, str | None]:
    """Finish reasons of the requests that finish in some steps."""
    outputs = [output for _ in range(steps) for output in engine.step()]
    return {o.request_id: o.outputs[0].finish_reason for o in outputs if o.finished}


def test_the_others_go_on(engine):
    engine.add_request("held", [6, 7], dataclasses.replace(GREEDY, n=3, temperature=1))
    engine.add_request("later", [8, 9], dataclasses.replace(GREEDY, max_tokens=3))
    assert finished(engine, 10) == {"later": "length"}
    assert engine.stats().num_waiting == 3
    engine._worker.compiling.clear()
    assert finished(engine) == {"runs": "length", "held": "length"}
    assert engine.stats().num_waiting == 0


def test_it_runs_when_nothing_else_does(engine):
    engine.add_request("held", [6, 7], GREEDY)
    assert finished(engine) == {"runs": "length", "held": "length"}


def test_it_can_be_aborted(engine):
    engine.add_request("held", [6, 7], GREEDY)
    engine.step()
    engine.abort_request("held")
    assert finished(engine) == {"held": "abort", "runs": "length"}
    assert not engine.has_unfinished_requests()


def test_its_time_limit_holds(engine):
    engine.add_request("held", [6, 7], GREEDY, timeout=0.001)
    time.sleep(0.01)
    assert finished(engine, 3) == {"held": "abort"}


@pytest.mark.thorough
def test_streams_go_on_while_prompt_logprobs_compile(tiny, monkeypatch):
    monkeypatch.setattr(worker_module, "_CPU_PADDING", math.inf)
    gate, compile_it = threading.Event(), CompiledPrograms.compile

    def gated(self, key, lowered) -> None:
        assert key.kind != "prompt_logprobs" or gate.wait(60)
        compile_it(self, key, lowered)

    expected = run(make_engine(tiny), [("scored", [4, 5, 6, 7], SCORED)])["scored"]
    monkeypatch.setattr(CompiledPrograms, "compile", gated)
    engine = make_engine(tiny, warmup="background", num_pages=29)
    engine.add_request("runs", [9] * 12, dataclasses.replace(GREEDY, max_tokens=140))
    engine.step()
    engine.add_request("scored", [4, 5, 6, 7], SCORED)
    for _ in range(60):
        assert not any(output.finished for output in engine.step())
    waited = engine.compile_progress().waited_seconds()
    gate.set()
    wait_until_compiled(engine)
    outputs = [output for _ in range(200) for output in engine.step() if output.finished]
    assert [output.request_id for output in outputs] == ["scored", "runs"]
    same_logprobs(outputs[0].prompt_logprobs, expected.prompt_logprobs)
    assert engine.compile_progress().waited_seconds() == waited
    engine.close()
