"""A real engine that sleeps and wakes up: its tokens, prefixes, memory and compilations."""

import gc
import json
import weakref
from pathlib import Path

import jax
import pytest

from rjax.errors import EngineSleepingError, InvalidConfigError, OutOfMemoryError
from rjax.sampling import SamplingParams
from rjax.worker import sleeping

from .recorded import TESTS
from .tiny import make_engine, run
from .virtual_devices import run_on_virtual_devices

pytestmark = pytest.mark.usefixtures("kept")

HYBRID = TESTS / "golden" / "families" / "models" / "qwen3_5_r3_g2_linear_last"
PREFIX = [3 + i % 40 for i in range(29)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=9, n=2, ignore_eos=True)
REQUESTS = [(str(i), [*PREFIX, 50 + i, 7 * i + 1], PARAMS) for i in range(3)]
MODELS = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "int4": {"quantization": "int4"},
    "hybrid": {
        "load_format": "auto",
        "dtype": "float32",
        "max_model_len": 96,
        "num_pages": 96,
        "max_num_seqs": 4,
        "num_states": 40,
    },
}
_PROGRAM = """
import json
from tests.engine.test_sleep import answers_around_sleep
print(json.dumps(answers_around_sleep({folder!r}, tensor_parallel_size=2)))
"""


def said(outputs) -> dict[str, list[list[int]]]:
    return {name: [c.token_ids for c in output.outputs] for name, output in outputs.items()}


def answers_around_sleep(folder: str, **options) -> list[dict[str, list[list[int]]]]:
    """What an engine says before it sleeps and after it has woken up."""
    engine = make_engine(Path(folder), **options)
    before = said(run(engine, REQUESTS))
    engine.sleep()
    engine.wake_up()
    return [before, said(run(engine, REQUESTS))]


def device_bytes() -> int:
    gc.collect()
    return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind != "pinned_host")


@pytest.fixture
def compilations():
    """Counts what XLA compiles."""
    counted = []

    def listen(name: str, seconds: float, **_) -> None:
        if name == "/jax/core/compile/backend_compile_duration":
            counted.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counted
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize(
    ("model", "level"),
    [("hybrid", 1), ("fp8", 2), ("int4", 1), ("plain", 2), ("hybrid", 2), ("fp8", 1)],
)
def test_a_woken_engine_goes_on_where_it_was(tiny, model, level, compilations):
    engine = make_engine(HYBRID if model == "hybrid" else tiny, **MODELS[model])
    engine.add_prefix("p", PREFIX)
    engine._prefixes.pinned.unload()
    wanted = said(run(engine, REQUESTS))  # the steps of a first request, with a prefix to fill
    worker = engine._worker
    arrays = [*worker._runner.leaves, *jax.tree.leaves(worker._state.arrays)]
    held, size = [weakref.ref(array) for array in arrays], sum(a.nbytes for a in arrays)
    del arrays

    awake = device_bytes()
    engine.sleep(level)
    asleep = device_bytes()
    assert not any(ref() is not None for ref in held), "something holds arrays of the engine"
    assert asleep <= awake - size
    with pytest.raises(EngineSleepingError, match="call wake_up first"):
        engine.add_request("r", [5], PARAMS)
    for call in (engine.resume, lambda: engine.save_prefix("p", "/nowhere")):
        with pytest.raises(EngineSleepingError):
            call()
    assert [(p.name, p.token_ids, p.pages) for p in engine.prefixes()] == [("p", tuple(PREFIX), ())]
    assert engine.stats().kv_bytes_used == 0

    count = len(compilations)
    engine.wake_up(["weights"])
    assert level == 2 or len(compilations) == count
    count = len(compilations)
    assert engine.is_sleeping()
    engine.wake_up(["kv_cache"])
    assert not engine.is_sleeping() and not engine.is_paused()
    found = run(engine, REQUESTS)
    assert len(compilations) == count, "the first token waited for a compilation"
    assert said(found) == wanted
    (prefix,) = engine.prefixes()
    assert prefix.pages, "the first request that starts with it fills it again"
    assert all(output.num_cached_tokens >= 24 for output in found.values())
    assert device_bytes() <= awake + 2**16


@pytest.mark.parametrize("model", ["plain", pytest.param("hybrid", marks=pytest.mark.thorough)])
def test_requests_that_run_go_on_after_a_sleep(tiny, model):
    engine = make_engine(HYBRID if model == "hybrid" else tiny, **MODELS[model])
    wanted = said(run(engine, REQUESTS))
    for request in REQUESTS:
        engine.add_request(*request)
    for _ in range(5):
        assert not [output for output in engine.step() if output.finished]
    assert any(c.token_ids for r in engine._requests.values() for c in r.completions)
    engine.sleep()
    while engine.has_unfinished_requests():  # what was read of the steps in flight
        assert not [output for output in engine.step() if output.finished]
    engine.wake_up()
    assert said(run(engine, [])) == wanted


@pytest.mark.thorough
def test_two_devices_sleep_too(tiny):
    before, after = json.loads(run_on_virtual_devices(_PROGRAM.format(folder=str(tiny)), 2))
    assert before == after


def test_weights_that_find_no_host_memory_stay(tiny, monkeypatch):
    engine = make_engine(tiny)
    wanted = said(run(engine, REQUESTS))

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no page-locked memory")

    with monkeypatch.context() as patch:
        patch.setattr(sleeping.jax, "device_put", exhausted)
        with pytest.raises(OutOfMemoryError, match="sleep with level 2"):
            engine.sleep()
    assert not engine.is_sleeping() and not engine.is_paused()
    assert said(run(engine, REQUESTS)) == wanted


@pytest.mark.thorough
def test_a_checkpoint_of_another_model_is_refused(tiny):
    engine, other = make_engine(tiny), make_engine(tiny, quantization="fp8")
    wanted = said(run(engine, REQUESTS))
    engine.sleep(2)
    weights = engine._worker._weights
    right, weights._reload = weights._reload, other._worker._weights._reload
    with pytest.raises(InvalidConfigError, match="the checkpoint has changed"):
        engine.wake_up()
    assert engine.is_sleeping()
    weights._reload = right
    engine.wake_up()
    assert said(run(engine, REQUESTS)) == wanted
