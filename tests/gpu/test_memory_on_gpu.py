"""Pages on a GPU: swapped, computed again, copied, saved and loaded; nothing compiled while served.

Answers of the bundled model are compared up to their end: it is sure of them, so that they do not
hang on the order of a sum.
"""

import contextlib

import jax
import numpy as np
import pytest

from rjax import LLM, SamplingParams
from rjax.batch.page_operations import CopyPages, SwapIn, SwapOut
from rjax.errors import OutOfMemoryError
from rjax.models.tables.demo import demo_questions, demo_system_prompt

pytestmark = pytest.mark.gpu

# Long beyond the answers, so that sequences grow by several pages.
LONG = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True)
QUESTIONS = demo_questions()[:8]
SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 2048}


def start(**options) -> LLM:
    return LLM(use_tqdm=False, enable_relay_attention="on", **(SMALL | options))


def conversations():
    system = {"role": "system", "content": demo_system_prompt()}
    return [[system, {"role": "user", "content": question}] for question, _ in QUESTIONS]


def answers(llm: LLM) -> list[list[int]]:
    """Tokens up to the end of each answer."""
    ends = llm.engine.tokenizer.eos_token_ids
    found = []
    for output in llm.chat(conversations(), LONG, use_tqdm=False):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == LONG.max_tokens
        end = next(i for i, token in enumerate(tokens) if token in ends)
        found.append(tokens[:end])
    return found


@pytest.fixture(scope="module")
def roomy():
    llm = start(num_pages=256)
    found = answers(llm)
    assert llm.stats().preemptions == 0
    tokenizer = llm.engine.tokenizer
    assert [tokenizer.decode(a).strip() for a in found] == [want for _, want in QUESTIONS]
    return found


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_tiny_pool_gives_the_same_answers(roomy, preemption):
    llm = start(num_pages=36, preemption=preemption, swap_space="16MiB")
    for _ in range(2):  # cold, then warm
        assert answers(llm) == roomy
        stats = llm.stats()
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == (preemption == "swap")
        assert (stats.pages_swapped_in > 0) == (preemption == "swap")
        assert preemption == "swap" or stats.pages_copied > 0
        assert stats.kv_tokens_read < stats.kv_tokens_unshared
        assert stats.kv_bytes_used == stats.host_bytes_used == 0


def test_samples_are_swapped_as_a_group(roomy):
    llm = start(num_pages=36, swap_space="16MiB")
    params = SamplingParams(temperature=0.01, n=3, max_tokens=140, ignore_eos=True, seed=1)
    outputs = llm.chat(conversations()[:3], params, use_tqdm=False)
    for output, want in zip(outputs, roomy, strict=False):
        for sample in output.outputs:
            assert sample.token_ids[: len(want)] == want
    stats = llm.stats()
    assert stats.swaps > 0
    assert stats.pages_swapped_in > 0


def test_pages_come_back_bit_by_bit():
    llm = start(num_pages=200, swap_space="128MiB")
    worker = llm.engine._worker  # type: ignore[attr-defined]
    rng = np.random.default_rng(0)
    data = rng.normal(size=(200, *worker.page_shape)).astype(worker.kv_dtype)
    everything = list(range(200))
    worker.write_pages(everything, data)
    away, back = rng.permutation(200)[:150].tolist(), rng.permutation(200)[:150].tolist()
    slots = rng.permutation(worker.num_host_pages)[:150].tolist()
    worker.move([SwapOut(away[:80], slots[:80]), CopyPages([7, 9], [8, 10])])
    want = data.copy()
    want[[8, 10]] = data[[7, 9]]
    worker.move([SwapOut(away[80:], slots[80:]), SwapIn(slots, back)])
    held = np.concatenate([data[away[:80]], want[away[80:]]])
    want[back] = held
    found = worker.read_pages(everything)
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found.view(np.uint8), want.view(np.uint8))


@contextlib.contextmanager
def compilations():
    """Names of the events of compiling, as they come."""
    found: list[str] = []

    def listen(event: str, seconds: float, **more) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_after_a_warmup():
    llm = start(num_pages=36, preemption="swap", swap_space="16MiB", warmup="on")
    random = SamplingParams(temperature=0.8, seed=1, max_tokens=140, ignore_eos=True)
    with compilations() as found:
        llm.chat(conversations(), [LONG, random] * 4, use_tqdm=False)
        llm.generate([[5] * 900, [6] * 3], random, use_tqdm=False)
        llm.add_prefix("ids", [9] * 200)
        llm.generate([[7]], LONG, prefix="ids", use_tqdm=False)
    stats = llm.stats()
    assert stats.pages_swapped_in > 0
    assert stats.pages_copied > 0
    assert found == []


def test_a_saved_prefix_is_loaded_again(roomy, tmp_path):
    first = start(num_pages=256)
    tokenizer = first.engine.tokenizer
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template(c), add_special_tokens=False)
        for c in conversations()
    ]
    common = next(i for i in range(5000) if len({p[i] for p in prompts}) > 1)
    first.add_prefix("table", prompts[0][:common])
    path = tmp_path / "table.safetensors"
    first.save_prefix("table", path)

    llm = start(num_pages=256, prefix_files=(str(path),))
    assert llm.prefixes() == ["table"]
    assert llm.stats().steps == 0
    outputs = llm.generate(prompts, LONG, use_tqdm=False)
    for output, want in zip(outputs, roomy, strict=True):
        assert output.num_cached_tokens >= common
        assert output.outputs[0].token_ids[: len(want)] == want


def test_a_model_that_does_not_fit_says_what_would():
    with pytest.raises(OutOfMemoryError, match=r"gpu_memory_utilization|tensor_parallel_size"):
        start(gpu_memory_utilization=1e-6)
