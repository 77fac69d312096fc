"""LLM.score: log-likelihoods of continuations, with the prompt's KV computed once."""

import itertools
import math
from typing import Any

import pytest

from rjax.api.llm import LLM
from rjax.api.scoring import ScoreOutput
from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams

CONTEXT = "Name: Ann Lee, age: 41, country: Peru. " * 4 + "Where does Ann live?"
CHOICES = [" In Peru.", " In Chad", " Here", " x"]


def score(llm: LLM, *given: Any) -> list[ScoreOutput]:
    return llm.score(*given, use_tqdm=False)


def by_prompt_logprobs(llm: LLM, tokens: list[int], start: int) -> list[float]:
    """The same from a whole forward pass over the prompt, without cached KV."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    assert output.num_cached_tokens == 0
    rows = zip(tokens[start:], output.prompt_logprobs[start:], strict=True)
    return [entry[token].logprob for token, entry in rows if entry is not None]


def test_choices_share_their_prompt_and_get_the_model_s_chances(tiny_llm: LLM) -> None:
    encode = tiny_llm.get_tokenizer().encode
    context = encode(CONTEXT)
    tiny_llm.reset_prefix_cache()
    found = score(tiny_llm, CONTEXT, CHOICES)
    for choice, output in zip(CHOICES, found, strict=True):
        whole = encode(CONTEXT + choice)
        assert whole == context + output.token_ids  # no token lies across this seam
        want = by_prompt_logprobs(tiny_llm, whole, len(context))
        assert output.token_logprobs == pytest.approx(want, abs=1e-4)
        assert output.logprob == pytest.approx(sum(want), abs=1e-4)
    for output in found[1:]:
        assert output.num_cached_tokens >= (len(context) - 1) // 8 * 8
    again = score(tiny_llm, [CONTEXT] * 4, CHOICES)
    assert [o.logprob for o in again] == pytest.approx([o.logprob for o in found], abs=1e-4)
    # Every row whose logits are asked for is computed, though all its KV is there.
    assert all(o.num_cached_tokens < len(context) for o in again)


def test_greedy_is_what_generate_says(tiny_llm: LLM) -> None:
    prompt = tiny_llm.get_tokenizer().encode("The quick")
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    (output,) = tiny_llm.generate([prompt], greedy, use_tqdm=False)
    said = output.outputs[0]
    other = [*said.token_ids[:-1], (said.token_ids[-1] + 1) % 500]
    likely, less = score(tiny_llm, [prompt, prompt], [said.token_ids, other])
    assert likely.is_greedy
    assert not less.is_greedy
    assert likely.logprob == pytest.approx(said.cumulative_logprob, abs=1e-4)
    assert less.logprob < likely.logprob
    assert likely.token_ids == said.token_ids


@pytest.mark.slow
def test_chances_of_all_tokens_add_up(tiny_llm: LLM) -> None:
    pairs = score(tiny_llm, "", ["a"]), score(tiny_llm, [[0]], [[i] for i in range(512)])
    assert sum(math.exp(output.logprob) for output in pairs[1]) == pytest.approx(1, abs=1e-3)
    (first,) = pairs[0]  # after the beginning token
    assert first.logprob == pytest.approx(pairs[1][first.token_ids[0]].logprob, abs=1e-4)


def test_a_token_across_the_seam_belongs_to_the_continuation(tiny_llm: LLM) -> None:
    encode = tiny_llm.get_tokenizer().encode
    for cut in itertools.count(1):
        before, after = "quick"[:cut], "quick"[cut:]
        if encode("The " + before) != encode("The quick")[: len(encode("The " + before))]:
            break
    (output,) = score(tiny_llm, "The " + before, after)
    whole = encode("The quick")
    start = len(whole) - len(output.token_ids)
    assert output.token_ids == whole[start:]
    assert whole[:start] == encode("The " + before)[:start]


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        (["a", "b"], ["c"], "2 prompts for 1 continuations"),
        ("a", [[1]], "both as text"),
        ("a", "", "empty"),
        ("a", [], "empty list"),
        ([[1]], [[10**6]], "vocabulary"),
        ([[1]] * 2, [[1], [10**6]], r"prompts\[1\].*vocabulary"),
        ("x" * 9000, "y", "maximum context length"),
    ],
)
def test_wrong_pairs_are_refused(
    tiny_llm: LLM, prompts: Any, continuations: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        score(tiny_llm, prompts, continuations)
    assert not tiny_llm.engine.has_unfinished_requests()


def test_pooling_is_refused_in_one_line(tiny_llm: LLM) -> None:
    for method in (tiny_llm.embed, tiny_llm.encode):
        with pytest.raises(InvalidRequestError, match=r"no supported family does.*score"):
            method(["a"])
