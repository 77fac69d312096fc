"""A request's tokens do not depend on what else is in the engine."""

import numpy as np
import pytest

from rjax.sampling import SamplingParams

from .tiny import VOCAB, dense, make_engine, run

COUNT = 100

pytestmark = pytest.mark.usefixtures("no_annotations_checked", "kept")


def random_requests(count: int, seed: int):
    """Requests of all kinds over prompts that partly share beginnings."""
    rng = np.random.default_rng(seed)
    stems = [rng.integers(0, VOCAB, size).tolist() for size in (40, 24, 16, 0)]
    requests = []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        kind = i % 4
        params = SamplingParams(
            temperature=[0, 0.8, 1.3, 0][kind],
            seed=i,
            top_k=5 if kind == 2 else 0,
            top_p=0.9 if kind == 1 else 1.0,
            presence_penalty=0.5 if kind == 3 else 0.0,
            logit_bias={3: 1.5} if kind == 2 else None,
            max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=[7] if i % 5 == 0 else None,
        )
        requests.append((f"r{i}", stems[rng.integers(0, 4)] + own, params))
    return requests


def tokens(outputs):
    return {key: out.outputs[0].token_ids for key, out in outputs.items()}


@pytest.fixture(scope="module")
def alone(tiny):
    """The tokens of each request, one at a time, nothing cached."""
    engine = make_engine(
        tiny, num_pages=24, enable_prefix_caching=False, enable_relay_attention="off"
    )
    answers = {}
    for request in random_requests(COUNT, 0):
        answers.update(tokens(run(engine, [request])))
    return answers


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 24},
        {"num_pages": 24, "enable_relay_attention": "on", "max_num_batched_tokens": 16},
        {"num_pages": 24, "enable_relay_attention": "off", "enable_prefix_caching": False},
    ],
    ids=["auto", "relay-small-chunks", "no-sharing"],
)
def test_many_requests_through_a_small_pool(tiny, alone, options):
    engine = make_engine(tiny, **options)
    together = tokens(run(engine, random_requests(COUNT, 0)))
    assert together == alone
    stats = engine.stats()
    assert stats.preemptions > 0
    assert engine._blocks.counts().used == 0
    if options.get("enable_prefix_caching", True):
        assert stats.cached_tokens > 0
    if options.get("enable_relay_attention") == "on":
        assert stats.kv_tokens_read < stats.kv_tokens_unshared


def test_greedy_tokens_are_those_of_plain_forward_passes(tiny):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (1, 8, 9, 33, 70)]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
    engine = make_engine(tiny)
    outputs = run(engine, [(str(i), p, params) for i, p in enumerate(prompts)])
    dense_logits = dense(tiny)
    for i, prompt in enumerate(prompts):
        output = outputs[str(i)]
        full = prompt + output.outputs[0].token_ids
        logits = dense_logits(full[:-1])
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert output.outputs[0].token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
        found = output.prompt_logprobs[1:] + output.outputs[0].logprobs
        assert output.prompt_logprobs[0] is None
        assert len(found) == len(full) - 1
        for position, entry in enumerate(found):
            row = logprobs[position]
            assert entry[full[position + 1]].logprob == pytest.approx(
                row[full[position + 1]], abs=1e-4
            )
            best = int(row.argmax())
            assert entry[best].rank == 1
            assert entry[best].logprob == pytest.approx(row[best], abs=1e-4)


@pytest.mark.thorough
def test_n_samples_equal_n_seeded_requests_and_share_the_prompt(tiny):
    prompt = list(range(48))
    engine = make_engine(tiny, enable_relay_attention="on")
    params = SamplingParams(n=4, seed=11, max_tokens=12, temperature=1.0)
    output = run(engine, [("many", prompt, params)])["many"]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    again = run(make_engine(tiny), [("many", prompt, params)])["many"]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]
    stats = engine.stats()
    assert stats.cached_tokens == 3 * 47
    assert stats.peak_kv_bytes < stats.peak_kv_bytes_unshared
