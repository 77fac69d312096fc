"""What a request found, shared and suffered is told with it; the engine adds it all up."""

import pytest

from rjax.sampling import SamplingParams

from .fake_worker import fake_engine
from .tiny import make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_each_request_tells_what_it_found_and_what_it_shared():
    engine = fake_engine(
        num_pages=64, page_size=4, vocab=9, max_model_len=64, max_num_batched_tokens=64
    )
    prompt = [1, 2, 3, 4] * 5
    engine.add_request("first", prompt, GREEDY)
    engine.step()
    engine.step()
    engine.add_request("second", [*prompt, 5, 6], GREEDY)  # while the first one runs
    done = run(engine, [])
    done |= run(engine, [("third", [*prompt, 7], GREEDY)])  # found, but with nobody
    done |= run(engine, [("fourth", [8] * 9, GREEDY)])  # of its own
    found = {name: output.num_cached_tokens for name, output in done.items()}
    assert found == {"first": 0, "second": 20, "third": 20, "fourth": 0}
    shared = {name: output.metrics.num_shared_tokens for name, output in done.items()}
    assert shared == {"first": 0, "second": 20, "third": 0, "fourth": 0}
    stats = engine.stats()
    assert stats.prompt_tokens == sum(len(o.prompt_token_ids) for o in done.values())
    assert stats.cached_tokens == sum(found.values())
    assert stats.shared_tokens == sum(shared.values())
    assert stats.hit_rate == pytest.approx(40 / (20 + 22 + 21 + 9))
    assert all(o.metrics.num_preemptions == 0 for o in done.values())
    assert all(o.metrics.num_generated_tokens == 8 for o in done.values())


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemptions_are_told_with_the_requests_that_had_them(preemption):
    engine = fake_engine(num_pages=12, vocab=9, preemption=preemption)
    many = SamplingParams(max_tokens=10, seed=1)
    done = run(engine, [(str(i), [i, i, i], many) for i in range(4)])
    stats = engine.stats()
    each = [output.metrics.num_preemptions for output in done.values()]
    assert sum(each) == stats.preemptions > 0
    assert done["0"].metrics.num_preemptions == 0, "the first to come is the last to go"
    assert (stats.swaps > 0) == (stats.pages_swapped_out > 0) == (preemption == "swap")
    assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
    assert stats.host_bytes_used == stats.kv_bytes_used == 0


def test_the_share_of_tokens_read_is_told(tiny):
    prompt = list(range(64))
    requests = [(str(i), [*prompt, i], GREEDY) for i in range(6)]
    stats = {}
    for relay in ("on", "off"):
        engine = make_engine(tiny, enable_relay_attention=relay)
        run(engine, requests)
        stats[relay] = engine.stats()
    assert stats["off"].read_share == 1
    assert stats["off"].shared_groups == 0
    assert stats["on"].read_share < 0.5
    assert stats["on"].shared_groups > 0
    for found in stats.values():
        assert found.peak_kv_bytes < found.peak_kv_bytes_unshared
