"""Raw and processed log-probabilities in one batch, whatever else decides the tokens."""

import math

import numpy as np
import pytest

from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.sampling import SamplingParams

from .test_token_mask import Script
from .tiny import VOCAB, make_engine, run

pytestmark = pytest.mark.usefixtures("kept")

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SAMPLING = {"max_tokens": 6, "seed": 4, "ignore_eos": True, "logprobs": -1}
FEATURES = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "heat": {"temperature": 0.5},
    "top_k": {"temperature": 0.8, "top_k": 5},
    "allowed": {"temperature": 1.5, "allowed_token_ids": [1, 2, 3, 40, 96]},
}


def distributions(output) -> np.ndarray:
    """Log-probabilities [tokens, VOCAB] of a request that asked for all."""
    found = np.full((len(output.token_ids), VOCAB), np.nan, np.float32)
    for row, entries in zip(found, output.logprobs, strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    return found


def processed(raw: np.ndarray, name: str) -> np.ndarray:
    """What a row samples from, from the log-probabilities of the raw logits."""
    given = FEATURES[name]
    x = raw.astype(np.float64) / (given["temperature"] or 1.0)
    if "top_k" in given:
        x[x < np.sort(x, axis=1)[:, [-given["top_k"]]]] = -np.inf
    if "allowed_token_ids" in given:
        x[:, np.setdiff1d(np.arange(VOCAB), given["allowed_token_ids"])] = -np.inf
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def asked(mode: str | None) -> list:
    return [
        (f"{name} {mode}", PROMPT, SamplingParams(**SAMPLING, **given, logprobs_mode=mode))
        for name, given in FEATURES.items()
    ]


def test_each_request_gets_the_distribution_that_it_asks_for(tiny):
    engine = make_engine(tiny, max_logprobs=VOCAB)
    done = run(engine, [*asked("raw_logprobs"), *asked("processed_logprobs")])
    steps = [key for key in engine._worker._runner._called if key.kind == "step"]
    again = run(engine, asked("raw_logprobs"))
    for name in FEATURES:
        raw, mine = (done[f"{name} {mode}_logprobs"].outputs[0] for mode in ("raw", "processed"))
        assert raw.token_ids == mine.token_ids
        np.testing.assert_allclose(
            distributions(mine), processed(distributions(raw), name), rtol=1e-5, atol=1e-5
        )
        chosen = [entry[t].logprob for t, entry in zip(mine.token_ids, mine.logprobs, strict=True)]
        assert mine.cumulative_logprob == sum(chosen)
        assert math.isfinite(sum(chosen))
        # A neighbour that asks for the other distribution changes nothing.
        before = again[f"{name} raw_logprobs"].outputs[0]
        assert before.token_ids == raw.token_ids
        np.testing.assert_allclose(distributions(before), distributions(raw), atol=1e-5)
    # The programs of the model are the same: only the sampling after them differs.
    assert {key.features for key in steps} == {steps[0].features}


@pytest.mark.thorough
def test_the_engine_s_mode_serves_requests_without_one_also_between_decode_steps(tiny):
    """Steps with log-probabilities run one by one where others run as one program."""
    default = "processed_logprobs"
    engine = make_engine(tiny, max_logprobs=VOCAB, logprobs_mode=default, num_decode_steps=4)
    plain = ("none", PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    done = run(engine, [plain, *asked(None), *asked(default)])
    for name in FEATURES:
        one, other = (done[f"{name} {mode}"].outputs[0] for mode in (None, default))
        np.testing.assert_array_equal(distributions(one), distributions(other))


@pytest.mark.thorough
def test_a_mask_is_part_of_the_distribution(tiny):
    """The only allowed token is certain; the raw distribution does not know the mask."""
    engine = make_engine(tiny)
    tokens = [3, 50, 96, 7]
    for mode in ("raw_logprobs", "processed_logprobs"):
        params = SamplingParams(max_tokens=4, logprobs=1, logprobs_mode=mode)
        engine.add_request(mode, PROMPT, params, masks=[Script(tokens)])
    done = run(engine, [])
    for mode, is_certain in (("raw_logprobs", False), ("processed_logprobs", True)):
        found = done[mode].outputs[0]
        assert found.token_ids == tokens
        assert (found.cumulative_logprob == 0) == is_certain


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "raw", None])
def test_other_modes_are_refused_with_what_to_give(tiny, mode):
    with pytest.raises(InvalidConfigError, match="give 'raw_logprobs' or 'processed_logprobs'"):
        make_engine(tiny, logprobs_mode=mode)
    if mode is not None:
        with pytest.raises(InvalidRequestError, match=r"logprobs_mode.*give 'raw_logprobs'"):
            SamplingParams(logprobs_mode=mode)
