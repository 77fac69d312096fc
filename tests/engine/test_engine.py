"""The engine's manners: bad input, aborts, shared prefixes, memory, priorities."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rjax.errors import InvalidConfigError, InvalidRequestError, OutOfMemoryError
from rjax.sampling import RequestOutputKind, SamplingParams

from .fake_worker import fake_engine
from .tiny import LENGTH, VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

GREEDY = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(scope="module")
def engine(tiny):
    return make_engine(tiny)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "empty"),
        (
            [0] * LENGTH,
            f"context length is {LENGTH} tokens.*has {LENGTH} tokens; at most {LENGTH - 1}",
        ),
        ([0] * (LENGTH + 7), "shorten it"),
        ([1, VOCAB], f"token id {VOCAB} is out of vocabulary"),
        ([-1], "token id -1 is out of vocabulary"),
        ([2**31], "is out of vocabulary"),
        ([1.0], "not a token id"),
        ([True], "not a token id"),
        (["a"], "not a token id"),
    ],
)
def test_bad_prompts_are_refused_and_harm_no_other(engine, tokens, message):
    engine.add_request("good", [1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", tokens, GREEDY)
    assert len(run(engine, [])["good"].outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop=["x"]), "tokenizer"),
        (SamplingParams(stop_token_ids=[VOCAB]), str(VOCAB)),
        (SamplingParams(logit_bias={VOCAB: 1.0}), str(VOCAB)),
        (SamplingParams(allowed_token_ids=[2**30]), str(2**30)),
        (SamplingParams(logprobs=21), "21"),
    ],
)
def test_parameters_are_checked_against_the_model(engine, params, message):
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request("bad", [1], params)
    assert not engine.has_unfinished_requests()


def test_a_request_id_in_use_and_a_bad_priority_are_refused(engine):
    engine.add_request("same", [1], GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("same", [1], GREEDY)
    with pytest.raises(InvalidRequestError, match="priority"):
        engine.add_request("other", [1], GREEDY, priority=0.5)  # type: ignore[arg-type]
    run(engine, [])


def test_the_longest_prompt_gives_one_token(engine):
    output = run(engine, [("long", [1] * (LENGTH - 1), GREEDY)])["long"].outputs[0]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


def test_max_tokens_none_runs_to_the_models_length(engine):
    params = SamplingParams(temperature=0, max_tokens=None)
    output = run(engine, [("r", [1] * 150, params)])["r"].outputs[0]
    assert len(output.token_ids) == LENGTH - 150


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_an_abort_at_any_step_gives_every_page_back(tiny, engine, steps):
    engine.reset_prefix_cache()
    many = SamplingParams(n=3, max_tokens=20, seed=1)
    for i in range(6):
        engine.add_request(f"a{i}", [i] * 40, many)
    done = []
    for _ in range(steps):
        done += engine.step()
    for i in range(6):
        engine.abort_request(f"a{i}")
    engine.abort_request("unknown")
    while engine.has_unfinished_requests():
        done += engine.step()
    finished = [o for o in done if o.finished]
    assert sorted(o.request_id for o in finished) == [f"a{i}" for i in range(6)]
    assert engine._blocks.counts().used == 0
    after = run(engine, [("after", [3, 1, 4], GREEDY)])["after"]
    fresh = run(make_engine(tiny), [("after", [3, 1, 4], GREEDY)])["after"]
    assert after.outputs[0].token_ids == fresh.outputs[0].token_ids


@pytest.mark.thorough
def test_a_prefix_can_be_filled_and_replaced_without_compiling(tiny):
    engine = make_engine(tiny, num_pages=64)
    rng = np.random.default_rng(2)
    systems = [rng.integers(0, VOCAB, size).tolist() for size in (64, 48)]
    users = [rng.integers(0, VOCAB, 6).tolist() for _ in range(4)]
    plain = make_engine(
        tiny, num_pages=64, enable_prefix_caching=False, enable_relay_attention="off"
    )
    compiled = None
    for system in systems:
        engine.set_shared_prefix(system)
        engine.reset_prefix_cache()
        assert engine._blocks.counts().used == len(system) // 8
        requests = [(str(i), system + user, GREEDY) for i, user in enumerate(users)]
        got, want = run(engine, requests), run(plain, requests)
        for key in want:
            assert got[key].outputs[0].token_ids == want[key].outputs[0].token_ids
            assert got[key].num_cached_tokens == len(system)
        if compiled is not None:
            assert engine._worker.num_compiled == compiled
        compiled = engine._worker.num_compiled
    engine.set_shared_prefix([])
    assert engine._blocks.counts().used == 0


def test_a_prefix_that_leaves_no_room_is_refused(tiny):
    engine = make_engine(tiny, num_pages=LENGTH // 8 + 3)
    with pytest.raises(OutOfMemoryError, match="pinned"):
        engine.set_shared_prefix(list(range(64)))
    with pytest.raises(InvalidRequestError, match="at most"):
        engine.set_shared_prefix([0] * 400)
    with pytest.raises(InvalidConfigError, match="enable_prefix_caching"):
        make_engine(tiny, enable_prefix_caching=False).set_shared_prefix([1])


def test_a_pool_too_small_for_one_sequence_is_an_error(tiny):
    with pytest.raises(OutOfMemoryError, match="max_model_len"):
        make_engine(tiny, num_pages=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": LENGTH + 1}, "positions up to"),
        ({"max_model_len": 1}, "at least 2"),
        ({"backend": "magic"}, "choose one of"),
        ({"tensor_parallel_size": 64}, "devices"),
        ({"max_num_sequences": 3}, "nearest is 'max_num_seqs'"),
        ({"page_size": 12}, "choose one of"),
        ({"kv_cache_dtype": "int8"}, "choose one of auto, fp8, fp8_e4m3"),
        ({"max_num_seqs": 0}, "from 1"),
        ({"max_num_seqs": 2**31}, "from 1"),
        ({"num_pages": -4}, "from 1"),
        ({"max_num_batched_tokens": 4}, "below max_num_seqs"),
        ({"kv_split_size": 12}, "multiple of page_size"),
        ({"enable_relay_attention": "maybe"}, "auto, on, off"),
        ({"gpu_memory_utilization": float("nan")}, "share"),
        ({"sys_schema": "{__USR_PROMPT}{__SYS_PROMPT}"}, "sys_schema"),
        ({"sys_prompt_file": "/nowhere"}, "sys_prompt_file"),
    ],
)
def test_bad_settings_are_refused(tiny, options, message):
    with pytest.raises(InvalidConfigError, match=message):
        make_engine(tiny, **options)


def test_streamed_parts_add_up(engine):
    params = SamplingParams(temperature=0, max_tokens=9)
    whole = run(engine, [("w", [5, 6, 7], params)])["w"].outputs[0].token_ids
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        asked = dataclasses.replace(params, output_kind=kind)
        engine.add_request("s", [5, 6, 7], asked)
        parts = []
        while engine.has_unfinished_requests():
            parts += [o.outputs[0].token_ids for o in engine.step()]
        assert len(parts) == 9
        if kind == RequestOutputKind.DELTA:
            assert [token for part in parts for token in part] == whole
        else:
            assert parts == [whole[: i + 1] for i in range(9)]


def test_priority_goes_before_arrival():
    engine = fake_engine(max_num_seqs=1, vocab=9)
    for i, priority in enumerate([5, 5, -1, 2]):
        engine.add_request(f"p{i}", [i, i], GREEDY, priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["p2", "p3", "p0", "p1"]


def test_one_prefix_is_prefilled_once_for_requests_that_arrive_together(tiny):
    engine = make_engine(tiny, enable_relay_attention="on")
    prompt = list(range(80))
    run(engine, [(str(i), [*prompt, i], GREEDY) for i in range(6)])
    stats = engine.stats()
    assert stats.prompt_tokens == 6 * 81
    assert stats.cached_tokens == 5 * 80
    assert stats.kv_tokens_read < stats.kv_tokens_unshared


def test_unseeded_requests_differ_and_a_seeded_engine_repeats(tiny):
    params = SamplingParams(max_tokens=12)
    first, second = (
        run(make_engine(tiny), [("a", [1, 2], params), ("b", [1, 2], params)]) for _ in range(2)
    )
    assert first["a"].outputs[0].token_ids != first["b"].outputs[0].token_ids
    assert first["a"].outputs[0].token_ids == second["a"].outputs[0].token_ids


_SHARDED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny import make_engine, run
from rjax.sampling import SamplingParams
params = SamplingParams(temperature=0, max_tokens=30)
for size in (1, 2):
    engine = make_engine(
        Path({folder!r}),
        tensor_parallel_size=size,
        num_pages=24,
        preemption="swap",
        enable_relay_attention="on",
    )
    prompt = list(range(40))
    outputs = run(engine, [(str(i), [*prompt, i], params) for i in range(6)])
    assert engine.stats().pages_swapped_in > 0
    print([outputs[str(i)].outputs[0].token_ids for i in range(6)])
"""


@pytest.mark.thorough
def test_two_devices_give_the_tokens_of_one(tiny):
    script = _SHARDED.format(tests=str(Path(__file__).parent), folder=str(tiny))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    one, two = done.stdout.splitlines()
    assert one == two


def test_the_next_step_is_dispatched_before_the_last_one_is_read(tiny, monkeypatch):
    engine = make_engine(tiny)
    events = []
    dispatch, read = engine._worker.dispatch, engine._worker.read

    def spy_dispatch(batch, tables, **options):
        events.append("dispatch")
        return dispatch(batch, tables, **options)

    def spy_read(step):
        events.append("read")
        return read(step)

    monkeypatch.setattr(engine._worker, "dispatch", spy_dispatch)
    monkeypatch.setattr(engine._worker, "read", spy_read)
    run(engine, [("a", [1, 2], SamplingParams(temperature=0, max_tokens=4))])
    assert events == ["dispatch", *["dispatch", "read"] * 3, "read"]


def test_closing_waits_for_the_steps_that_are_under_way(tiny, monkeypatch):
    """A process that ends while the device computes may be aborted by a thread of XLA."""
    engine = make_engine(tiny)
    engine.add_request("a", list(range(1, 9)), SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    last, waited = engine._worker._state.arrays.last_tokens, []
    monkeypatch.setattr("jax.block_until_ready", lambda arrays: waited.append(arrays.last_tokens))
    engine.close()
    assert len(waited) == 1 and waited[0] is last
