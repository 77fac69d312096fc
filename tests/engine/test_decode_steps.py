"""Several decode steps in one program: the same tokens, in fewer visits of the host."""

from typing import Any

import numpy as np
import pytest

from rjax.config import EngineConfig
from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams
from tests.engine.tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

AT_ONCE = 3  # in all tests, so that they share what is compiled


def requests(seed: int, count: int = 12):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 40).tolist()
    found = []
    for i in range(count):
        own = rng.integers(0, VOCAB, int(rng.integers(1, 30))).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.9])),
            top_p=0.9 if i == 3 else 1.0,
            max_tokens=4 if i in (3, 4) else int(rng.integers(20, 40)),
            stop_token_ids=rng.integers(0, VOCAB, 1).tolist(),
            logprobs=2 if i == 4 else None,
            seed=int(rng.integers(0, 100)),
        )
        found.append((str(i), shared + own if i % 2 else own, params))
    return found


def tokens(outputs):
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("pages", [pytest.param(64, marks=pytest.mark.slow), 24])
def test_the_tokens_are_those_of_single_steps(tiny, pages):
    given = requests(pages)
    one = make_engine(tiny, num_pages=pages)
    expected = tokens(run(one, given))
    many = make_engine(tiny, num_pages=pages, num_decode_steps=AT_ONCE)
    assert tokens(run(many, given)) == expected
    worker: Any = many._worker
    assert any(key.kind == "multi_step" for key in worker._runner.programs._compiled)
    if pages == 24:
        assert many.stats().preemptions > 0
    # All is given back: the same again, and no page is left in use.
    assert tokens(run(many, given)) == expected
    many.reset_prefix_cache()
    assert many.stats().kv_bytes_used == 0


def test_the_host_reads_many_steps_at_a_time(tiny):
    engine = make_engine(tiny, num_decode_steps=AT_ONCE)
    params = SamplingParams(temperature=0, max_tokens=13, ignore_eos=True)
    engine.add_request("a", [1, 2, 3], params)
    visits, news = 0, []
    while engine.has_unfinished_requests():
        found = engine.step()
        visits += 1
        news.append(len(found))
    # The prompt's step, four times three decode steps, and the last to be read.
    assert visits == 6
    assert sum(news) == 13
    assert max(news) == AT_ONCE


@pytest.mark.thorough
def test_an_abort_in_the_midst_harms_no_other(tiny):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = {"a": [5, 6, 7], "b": [8, 9]}
    expected = tokens(run(make_engine(tiny), [("b", prompts["b"], params)]))["b"]
    engine = make_engine(tiny, num_decode_steps=AT_ONCE)
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    engine.step()
    engine.step()
    engine.abort_request("a")
    engine.add_request("c", [1, 2, 3, 4], params)
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert last["a"].outputs[0].finish_reason == "abort"
    assert last["b"].outputs[0].token_ids == expected
    assert len(last["c"].outputs[0].token_ids) == 30


@pytest.mark.slow
def test_nothing_is_compiled_after_a_warm_up(tiny):
    few = {"max_num_seqs": 3, "max_num_batched_tokens": 8}  # few sizes
    engine = make_engine(tiny, num_decode_steps=AT_ONCE, warmup="on", **few)
    worker: Any = engine._worker
    compiled = worker.num_compiled
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    run(engine, [(str(i), [i + 1, 2], params) for i in range(3)])
    assert worker.num_compiled == compiled


def test_a_number_is_asked_for():
    with pytest.raises(InvalidConfigError, match="num_decode_steps is 0"):
        EngineConfig.from_options({"num_decode_steps": 0})
