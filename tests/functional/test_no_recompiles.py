"""Nothing compiles after a warm-up, whatever the requests and the shared prefix."""

import jax
import numpy as np
import pytest

from rjax.sampling import SamplingParams
from tests.engine.tiny import VOCAB, make_engine, write_config


class Compilations:
    """Counts what XLA compiles or fetches from its cache while listening."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration: float, **_) -> None:
        del duration
        self.count += event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


def workload(engine, seed: int, count: int) -> None:
    """Requests of all lengths and kinds that arrive while others run."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, VOCAB, 40).tolist()
    waiting = count
    while waiting or engine.has_unfinished_requests():
        for _ in range(min(waiting, int(rng.integers(0, 4)))):
            own = rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist()
            params = SamplingParams(
                temperature=float(rng.choice([0.0, 0.8])),
                top_p=0.9,
                max_tokens=int(rng.integers(1, 20)),
                ignore_eos=True,
                seed=int(rng.integers(0, 100)),
            )
            waiting -= 1
            prompt = shared + own if rng.random() < 0.5 else own
            engine.add_request(f"{seed}-{waiting}", prompt, params)
        engine.step()


@pytest.mark.thorough
def test_nothing_compiles_after_a_warm_up(tmp_path, compilations):
    engine = make_engine(write_config(tmp_path / "model"), num_pages=64)  # nothing is swapped
    assert compilations.count > 0
    for seed in range(3):
        workload(engine, seed, 24)
    engine.set_shared_prefix(list(range(24)))
    warm, steps = compilations.count, engine.stats().steps
    workload(engine, 17, 40)
    engine.set_shared_prefix(list(range(30, 60)))  # another shared prefix changes no shape
    engine.reset_prefix_cache()
    workload(engine, 18, 40)
    assert compilations.count == warm
    assert engine.stats().steps > steps + 50
