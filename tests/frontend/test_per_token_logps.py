"""get_per_token_logps: the log-probabilities of given completions, as trainers need them."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rjax.api.async_llm import AsyncLLM
from rjax.api.llm import LLM
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams

PROMPTS = [[*range(30, 61)], [7, 8, 9]]
LENGTH = 512  # of the tiny model


def logps(llm: LLM, prompts: Any, completions: Any, **given: Any) -> list[np.ndarray]:
    found = llm.get_per_token_logps(prompts, completions, use_tqdm=False, **given)
    assert all(each.dtype == np.float32 for each in found)
    return found


def sampled(llm: LLM, temperature: float) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, tokens and processed log-probabilities of each sample; twelve of two prompts."""
    params = SamplingParams(
        n=6, max_tokens=20, temperature=temperature, seed=3, ignore_eos=True, logprobs=0,
        logprobs_mode="processed_logprobs",
    )  # fmt: skip
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (prompt, sample.token_ids, sample.logprobs.sampled())  # pyright: ignore
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for sample in output.outputs
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_they_are_those_of_sampling_and_prompts_are_computed_once(
    tiny_llm: LLM, temperature: float
) -> None:
    prompts, completions, want = zip(*sampled(tiny_llm, temperature), strict=True)
    tiny_llm.reset_prefix_cache()
    before = tiny_llm.stats().cached_tokens
    found = logps(tiny_llm, list(prompts), list(completions), temperature=temperature)
    for mine, theirs in zip(found, want, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
    pages = (len(PROMPTS[0]) - 1) // 8 * 8  # the second prompt is shorter than a page
    assert tiny_llm.stats().cached_tokens - before >= 5 * pages
    again = logps(tiny_llm, list(prompts), list(completions), temperature=temperature)
    for mine, theirs in zip(again, found, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_temperatures_of_one_batch_do_not_mix(tiny_llm: LLM) -> None:
    """Log-probabilities of two temperatures differ by the factor and a constant."""
    tokens = [[token] for token in range(20, 32)]
    raw = np.concatenate(logps(tiny_llm, [PROMPTS[1]], tokens)).astype(np.float64)

    async def both() -> list[list[np.ndarray]]:
        llm = AsyncLLM.from_engine(tiny_llm.engine)
        ask = llm.get_per_token_logps
        pairs = [PROMPTS[1]], tokens[:40]
        found = await asyncio.gather(ask(*pairs), ask(*pairs, temperature=0.5))
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\].*vocabulary"):
            await ask([[5]] * 8, [[3], [10**6], *[[4]] * 6])
        await llm.close()
        return found

    one, other = asyncio.run(both())
    np.testing.assert_allclose(np.concatenate(one), raw, atol=2e-5)
    constant = np.concatenate(other) - raw / 0.5
    assert abs(constant[0]) > 0.1
    np.testing.assert_allclose(constant, constant[0], atol=2e-5)


def test_prompt_and_completion_may_fill_the_model_s_length(tiny_llm: LLM) -> None:
    tokens = np.random.default_rng(0).integers(3, 300, LENGTH)
    too_long = f"length is {LENGTH} tokens, and there are {LENGTH + 1} to score"
    (whole,) = logps(tiny_llm, [tokens[:9]], [tokens[9:]])
    (short,) = logps(tiny_llm, [tokens[:9]], [tokens[9:-1]])
    assert whole.shape == (LENGTH - 9,)
    np.testing.assert_allclose(whole[:-1], short, atol=2e-5)
    with pytest.raises(InvalidRequestError, match=too_long):
        logps(tiny_llm, [tokens[:9]], [[*tokens[9:], 5]])


@pytest.mark.parametrize(
    ("prompts", "completions", "temperature", "message"),
    [
        ([[1]], [[2]], 0.0, "temperature is 0.0; give a number from 0.01 to 100"),
        ([[1]], [[2]], float("nan"), "temperature is nan; give"),
        ([[1], [2]], [[3], [4], [5]], 1.0, "2 prompts for 3 continuations"),
        ([[1]], [[]], 1.0, "pair 0: the continuation is empty; give"),
        ([[1], []], [[2], [3]], 1.0, "the prompt is empty; give at least one token id"),
        ([[1]], [[0.5]], 1.0, "is 0.5, which is no whole number"),
        ([[1]], [[-1]], 1.0, "vocabulary"),
        (["a"], [[1]], 1.0, "both as text or both as token ids"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    tiny_llm: LLM, prompts: Any, completions: Any, temperature: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        logps(tiny_llm, prompts, completions, temperature=temperature)
