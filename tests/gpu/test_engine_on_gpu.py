"""The whole engine on a GPU: the bundled model answers the same by every way to the answer."""

import dataclasses

import numpy as np
import pytest

from rjax import LLM, SamplingParams
from rjax.models.tables.demo import demo_questions, demo_system_prompt

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=64)


def conversations():
    system = {"role": "system", "content": demo_system_prompt()}
    return [[system, {"role": "user", "content": question}] for question, _ in demo_questions()]


def answers(**options) -> tuple[list[str], LLM]:
    llm = LLM(use_tqdm=False, max_num_seqs=32, **options)
    outputs = llm.chat(conversations(), GREEDY, use_tqdm=False)
    return [output.outputs[0].text.strip() for output in outputs], llm


@pytest.fixture(scope="module")
def reference():
    """Answers of the plain float32 backend, nothing shared."""
    found, llm = answers(backend="xla", dtype="float32", enable_relay_attention="off")
    assert llm.stats().backend == "xla"
    return found


def test_the_reference_answers_the_demo(reference):
    right = [a == want for a, (_, want) in zip(reference, demo_questions(), strict=True)]
    assert np.mean(right) >= 0.9


@pytest.mark.parametrize("relay", ["on", "off", "auto"])
@pytest.mark.parametrize("backend", ["mosaic", "triton", "xla"])
def test_relay_and_backend_leave_the_answers_alone(reference, backend, relay):
    if backend == "triton":
        pytest.importorskip("jax_triton", exc_type=ImportError)
    found, llm = answers(backend=backend, dtype="bfloat16", enable_relay_attention=relay)
    assert llm.stats().backend == backend
    assert found == reference
    if relay == "on":
        stats = llm.stats()
        assert stats.kv_tokens_read < stats.kv_tokens_unshared


def test_one_conversation_at_a_time(reference):
    """Steps of one row, whose norms and relay fusion are in the products that follow."""
    llm = LLM(use_tqdm=False, max_num_seqs=4, backend="mosaic", dtype="bfloat16")
    assert llm.engine._worker.shapes.decode[0].rows == 1
    found = [
        llm.chat(conversation, GREEDY, use_tqdm=False)[0].outputs[0].text.strip()
        for conversation in conversations()
    ]
    assert found == reference
    assert llm.stats().steps_by_size[0] > len(found)


@pytest.mark.parametrize("relay", ["on", "off"])
def test_pages_of_float8_leave_most_answers_alone(reference, relay):
    """Eight bits move logits: an answer of 16 may differ, not what reads and writes the pages."""
    found, llm = answers(kv_cache_dtype="fp8", backend="mosaic", enable_relay_attention=relay)
    stats = llm.stats()
    assert stats.backend == "mosaic"
    assert (stats.kv_tokens_read < stats.kv_tokens_unshared) == (relay == "on")
    assert np.mean([a == b for a, b in zip(found, reference, strict=True)]) >= 0.9


def test_relay_on_and_off_give_the_same_tokens_for_random_prompts():
    """Bit by bit: only whole KV splits are shared, so both split a row at the same places."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=32, ignore_eos=True, logprobs=0)
    stem = rng.integers(10, 2000, 1100).tolist()
    prompts = [[*stem, *rng.integers(10, 2000, 40).tolist()] for _ in range(24)]
    results = []
    for relay in ("on", "off"):
        llm = LLM(use_tqdm=False, max_num_seqs=32, enable_relay_attention=relay)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert results[0] == results[1]


def test_a_step_that_is_held_for_some_changes_nothing_for_others():
    """Every other request has a bad word: its steps are sampled apart, when the host knows more."""
    llm = LLM(use_tqdm=False, max_num_seqs=32)
    free = [o.outputs[0].text for o in llm.chat(conversations(), GREEDY, use_tqdm=False)]
    bad = [text.split()[0] for text in free]
    params = [
        dataclasses.replace(GREEDY, bad_words=[word]) if i % 2 else GREEDY
        for i, word in enumerate(bad)
    ]
    held = [o.outputs[0].text for o in llm.chat(conversations(), params, use_tqdm=False)]
    assert held[::2] == free[::2]
    assert not any(text.startswith(word) for text, word in zip(held[1::2], bad[1::2], strict=True))


def test_what_an_engine_decides_leaves_the_tokens_alone():
    """The bundled model is small, so the host is slower than the device."""
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    prompts = [[10 + i] * 40 for i in range(8)]
    tokens = []
    for options in ({"num_decode_steps": 1}, {"warmup": "on"}):
        llm = LLM(use_tqdm=False, max_num_seqs=8, enable_relay_attention="on", **options)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
    assert llm.stats().multi_steps > 0


def test_as_many_sequences_as_the_memory_holds():
    llm = LLM(use_tqdm=False)
    stats = llm.stats()
    assert stats.max_num_seqs == 256
    assert stats.kv_bytes_total >= 256 * 256 * stats.page_bytes / 64
