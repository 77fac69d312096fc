"""Layers with a state in place of KV: cached, in chunks, preempted or shared, the same tokens."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rjax.errors import InvalidConfigError, OutOfMemoryError
from rjax.models import DenseAttention, load_model
from rjax.pallas_kernels.gated_delta.states import LayerStates
from rjax.sampling import SamplingParams

from .invariants import check, run_checked
from .recorded import TESTS
from .tiny import make_engine, run
from .virtual_devices import run_on_virtual_devices

FOLDER = TESTS / "golden" / "families" / "models" / "qwen3_5_r3_g2_linear_last"
LENGTH, S = 96, 8
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

pytestmark = [
    pytest.mark.usefixtures("no_annotations_checked"),
    pytest.mark.usefixtures("kept"),
]


def engine(**options):
    """Splits of two pages: a snapshot at every sixteenth token."""
    settings = {
        "load_format": "auto",
        "dtype": "float32",
        "max_model_len": LENGTH,
        "num_pages": 96,
        "max_num_seqs": 4,
        "num_states": 40,
        "kv_split_size": 16,
    }
    return make_engine(FOLDER, **settings | options)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 60, count).tolist()


PROMPTS = [tokens(50), tokens(37) + tokens(9, 1), tokens(37) + tokens(20, 2), tokens(24), [5]]


@pytest.fixture(scope="module")
def alone():
    """The greedy tokens after a prompt, by plain forward passes."""
    loaded = load_model(FOLDER, dtype="float32", progress=False, max_length=LENGTH)

    @jax.jit
    def logits(ids):
        return loaded.model.logits(loaded.model(ids, jnp.arange(LENGTH), DenseAttention()))

    found = {}

    def after(prompt, count=GREEDY.max_tokens):
        key = tuple(prompt)
        if len(found.get(key, ())) < count:
            said = list(prompt)
            for _ in range(count):
                padded = jnp.asarray(said + [0] * (LENGTH - len(said)))
                said.append(int(logits(padded)[len(said) - 1].argmax()))
            found[key] = said[len(prompt) :]
        return found[key][:count]

    return after


def said(output) -> list[int]:
    return list(output.outputs[0].token_ids)


def ask(served, prompt, name="a", params=GREEDY, **options):
    """One request to its end, with every invariant after every step."""
    served.add_request(name, prompt, params, **options)
    return run_checked(served)[name]


@pytest.mark.sample(1, 5)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("most", [16, 32, 64])
@pytest.mark.parametrize("relay", ["on", "off", "auto"])
def test_chunks_and_the_cache_change_no_token(alone, caching, most, relay):
    served = engine(
        enable_prefix_caching=caching, max_num_batched_tokens=most, enable_relay_attention=relay
    )
    for round_ in range(2):
        done = run(served, [(f"{round_} {i}", p, GREEDY) for i, p in enumerate(PROMPTS)])
        for i, prompt in enumerate(PROMPTS):
            assert said(done[f"{round_} {i}"]) == alone(prompt)
    assert (served.stats().cached_tokens > 0) is caching
    served.close()


def test_a_hit_goes_on_from_the_nearest_state():
    """Snapshots are at every split, at the end of a chunk, and where prompts part."""
    served = engine(max_num_batched_tokens=64)
    assert ask(served, PROMPTS[0]).num_cached_tokens == 0
    # The chunk of 50 tokens left the states behind 16, 32 and 48. They part at 37.
    assert ask(served, PROMPTS[1]).num_cached_tokens == 32
    assert ask(served, PROMPTS[0]).num_cached_tokens == 48
    assert ask(served, PROMPTS[0][:48]).num_cached_tokens == 32  # one token has to be computed
    served.reset_prefix_cache()
    assert ask(served, tokens(29, 5)).num_cached_tokens == 0  # 16, and 24, the end of the chunk
    assert ask(served, tokens(29, 5) + tokens(20, 6)).num_cached_tokens == 24
    served.close()


@pytest.mark.thorough
def test_a_snapshot_is_kept_where_prompts_part():
    served = engine(max_num_batched_tokens=64, kv_split_size=64)
    assert ask(served, PROMPTS[0]).num_cached_tokens == 0  # 48, the end of the chunk, alone
    second = ask(served, PROMPTS[1])
    assert second.num_cached_tokens == 0  # KV behind 32 tokens is cached, and no state
    third = ask(served, tokens(37) + tokens(13, 9))
    assert third.num_cached_tokens == 32
    served.close()


@pytest.mark.parametrize("preemption", ["swap", pytest.param("auto", marks=pytest.mark.thorough)])
def test_a_preemption_at_any_step_changes_no_token(alone, preemption):
    """Sequences are preempted in their prompts, in their answers and where they compute again what
    the cache has the KV of, at the ends of pages and between."""
    served = engine(max_num_batched_tokens=16, enable_relay_attention="on", preemption=preemption)
    served._scheduler.cost.token_seconds = 1.0  # "auto" swaps what has to be computed again
    draw, asked, count = np.random.default_rng(4), {}, 0
    for round_ in range(2):
        for i, prompt in enumerate(PROMPTS):
            asked[f"{round_} {i}"] = prompt
            served.add_request(f"{round_} {i}", prompt, GREEDY)
        while served.has_unfinished_requests():
            for output in served.step():
                if output.finished:
                    assert said(output) == alone(asked.pop(output.request_id))
            running = served._scheduler.running
            if running and draw.random() < 0.8:
                served._scheduler.preempt(running[int(draw.integers(len(running)))])
                count += 1
            check(served)
    assert not asked
    assert 2 * served.stats().swaps > count > 20
    served.close()


@pytest.mark.thorough
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("options", [{"num_states": 4}, {"num_pages": 16}])
def test_preempted_sequences_say_the_same(alone, options, preemption):
    """Four sequences come to the ends of their pages at once, where each needs one more."""
    served = engine(
        max_num_batched_tokens=128,
        enable_prefix_caching="num_pages" in options,
        preemption=preemption,
        **options,
    )
    params = dataclasses.replace(GREEDY, max_tokens=20)
    prompts = [tokens(30, seed) for seed in range(4)]
    for i, prompt in enumerate(prompts):
        served.add_request(str(i), prompt, params)
    done = run_checked(served)
    assert [said(done[str(i)]) for i in range(4)] == [alone(prompt, 20) for prompt in prompts]
    stats = served.stats()
    assert stats.preemptions > 0
    assert (stats.swaps > 0) is (preemption == "swap")
    assert stats.host_bytes_used == 0
    served.close()


@pytest.mark.thorough
@pytest.mark.parametrize("states", [2, 3])
def test_few_states_serve_one_sequence_after_another(alone, states):
    served = engine(num_states=states)
    for i, prompt in enumerate(PROMPTS):
        served.add_request(str(i), prompt, GREEDY)
    done = run_checked(served)
    assert [said(done[str(i)]) for i in range(5)] == [alone(prompt) for prompt in PROMPTS]
    served.close()


@pytest.mark.thorough
def test_samples_share_the_prompt():
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    found = []
    for caching in (True, False):
        served = engine(enable_prefix_caching=caching)
        done = ask(served, PROMPTS[0], params=params)
        found.append([list(completion.token_ids) for completion in done.outputs])
        served.close()
    assert found[0] == found[1]
    assert len({tuple(sample) for sample in found[0]}) > 1


def test_samples_compute_little_of_the_prompt_again():
    served = engine(max_num_batched_tokens=64)
    served.add_request("a", PROMPTS[0], SamplingParams(n=4, seed=1, max_tokens=4))
    run_checked(served)
    stats = served.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (4 * 50, 3 * 48)
    served.close()


@pytest.mark.thorough
def test_a_named_prefix_holds_its_state(alone, tmp_path):
    prefix, path = tokens(37), tmp_path / "prefix.safetensors"
    served = engine(max_num_batched_tokens=32)
    served.add_prefix("manual", prefix)
    run(served, [(str(i), tokens(60, 40 + i), GREEDY) for i in range(30)])  # evicts the others
    first = ask(served, PROMPTS[1])
    assert (first.num_cached_tokens, said(first)) == (32, alone(PROMPTS[1]))
    served.save_prefix("manual", path)
    served.drop_prefix("manual")
    check(served)
    served.reset_prefix_cache()
    assert served._scheduler.states.pool.counts().used == 0
    served.close()

    other = engine(max_num_batched_tokens=32)
    other.load_prefix(path)
    check(other)
    again = ask(other, PROMPTS[1])
    assert (again.num_cached_tokens, said(again)) == (32, said(first))
    other.add_request("b", PROMPTS[3], GREEDY)
    while not other._scheduler.running or other._scheduler.running[0].num_tokens < 28:
        other.step()
    other._scheduler.cost.mode = "swap"
    other._scheduler.preempt(other._scheduler.running[0])
    other.load_prefix(path, "again", cache_salt="a")  # perhaps into pages of that sequence
    assert other.stats().pages_swapped_out > 0, "they are saved first"
    assert said(run_checked(other)["b"]) == alone(PROMPTS[3])
    assert other.stats().swaps == 1
    other.close()


@pytest.mark.thorough
def test_salts_keep_states_apart():
    served = engine()
    assert ask(served, PROMPTS[0], cache_salt="a").num_cached_tokens == 0
    assert ask(served, PROMPTS[0], cache_salt="b").num_cached_tokens == 0
    assert ask(served, PROMPTS[0]).num_cached_tokens == 0
    assert ask(served, PROMPTS[0], cache_salt="a").num_cached_tokens == 48
    served.reset_prefix_cache()
    assert ask(served, PROMPTS[0], cache_salt="a").num_cached_tokens == 0
    served.close()


@pytest.mark.thorough
def test_prompt_logprobs_are_those_of_a_whole_prompt():
    params = dataclasses.replace(GREEDY, prompt_logprobs=0, max_tokens=1)

    def of(served):
        found = ask(served, PROMPTS[0], params=params).prompt_logprobs[1:]
        return [next(iter(each.values())).logprob for each in found]

    whole, chunks = engine(max_num_batched_tokens=64), engine(max_num_batched_tokens=16)
    expected = of(whole)
    np.testing.assert_allclose(of(chunks), expected, atol=1e-3)
    np.testing.assert_allclose(of(whole), expected, atol=1e-3)  # all of it is cached
    whole.close()
    chunks.close()


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [40, pytest.param(4000, marks=pytest.mark.slow)])
def test_nothing_reads_what_no_sequence_owns(alone, rounds):
    """Pages, states and tails of slots that no sequence owns are NaN before every step, and host
    slots that no sequence owns have no memory."""
    served = engine(num_states=7, num_pages=24, max_num_batched_tokens=16)
    draw = np.random.default_rng(11)

    @jax.jit
    def poisoned(arrays, free_pages, free_states, free_slots):
        """The arrays of the worker with NaN where these flags are set."""

        def fill(pool, flags):
            return jnp.where(flags.reshape(-1, *[1] * (pool.ndim - 1)), jnp.nan, pool)

        def of(field):
            return free_states if field in ("states", "conv_ends") else free_slots

        return dataclasses.replace(
            arrays,
            k_pages=[fill(pool, free_pages) for pool in arrays.k_pages],
            v_pages=[fill(pool, free_pages) for pool in arrays.v_pages],
            states=[
                LayerStates(
                    **{
                        field.name: fill(getattr(layer, field.name), of(field.name))
                        for field in dataclasses.fields(layer)
                    }
                )
                for layer in arrays.states
            ],
        )

    def flags(pool):
        found = np.zeros(pool.counts().total, bool)
        found[list(pool._free)] = True
        return found

    def poison():
        arrays, scheduler = served._worker._state.arrays, served._scheduler
        slots = np.ones(len(arrays.states[0].recent), bool)
        slots[[s.slot for s in scheduler.running]] = False
        states = flags(scheduler.states.pool)
        served._worker._state.arrays = poisoned(arrays, flags(served._blocks), states, slots)
        drop(served._worker._mover, scheduler.host)
        drop(served._worker._state_mover, scheduler.host_states)

    def drop(mover, host):
        for slot in host._free:
            mover._slots.pop(slot, None)

    asked, steps = {}, 0
    for number in range(rounds):
        served._scheduler.cost.mode = ("swap", "recompute")[number % 2]
        if draw.random() < 0.4:
            cut = int(draw.integers(1, 50))
            asked[str(number)] = PROMPTS[int(draw.integers(0, 3))][:cut] or [4]
            served.add_request(str(number), asked[str(number)], GREEDY)
        if draw.random() < 0.02:
            served.reset_prefix_cache()
        for _ in range(int(draw.integers(1, 5))):
            poison()
            steps += 1
            for output in served.step():
                if output.finished:
                    assert said(output) == alone(asked.pop(output.request_id))
            running = served._scheduler.running
            if running and draw.random() < 0.2:
                served._scheduler.preempt(running[int(draw.integers(len(running)))])
                served._move(served._scheduler.take_operations())
            check(served)
    for name, output in run_checked(served).items():
        assert said(output) == alone(asked.pop(name))
    assert not asked and steps > 2 * rounds
    assert 0 < served.stats().swaps < served.stats().preemptions
    served.close()


def test_too_few_states_are_refused():
    with pytest.raises(InvalidConfigError, match="num_states is 1"):
        engine(num_states=1)


@pytest.mark.thorough
def test_states_for_sequences_remain():
    served = engine(num_states=3)
    served.add_prefix("a", tokens(20))
    with pytest.raises(OutOfMemoryError, match="3 states"):
        served.add_prefix("b", tokens(20, 1))
    served.close()


@pytest.mark.slow
def test_devices_share_the_states():
    program = f"""
import json
import rjax

params = rjax.SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
prompts = [dict(prompt_token_ids=p) for p in {PROMPTS!r}]
for devices in (1, 2):
    llm = rjax.LLM(
        {str(FOLDER.with_name("qwen3_next_r2_g3_tied_fused"))!r},
        dtype="float32",
        max_model_len={LENGTH},
        page_size=8,
        num_pages=16,
        preemption="swap",
        max_num_batched_tokens=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=devices,
        use_tqdm=False,
    )
    outputs = llm.generate(prompts, params)
    said = [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps([llm.stats().swaps, said]))
"""
    one, two = map(json.loads, run_on_virtual_devices(program, 2).splitlines()[-2:])
    assert one == two
    assert one[0] > 0
