"""Log-likelihoods of given continuations."""

import dataclasses
from typing import Any, Never

from rjax.api.prefixed_prompts import PrefixedPrompts
from rjax.api.prompts import Prompt, parse_prompt, split_prompts
from rjax.api.request_runner import NewRequest
from rjax.errors import InvalidRequestError
from rjax.outputs import RequestOutput
from rjax.sampling import SamplingParams
from rjax.tokenization import common_prefix

_PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


@dataclasses.dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a continuation is after its prompt.

    Attributes:
        logprob: natural log of the continuation's probability, the sum over its tokens.
        is_greedy: whether every token is the most likely one, so that greedy sampling gives it.
        token_ids: its tokens.
        token_logprobs: natural log of each token's probability.
        num_cached_tokens: prompt tokens served from the prefix cache.
    """

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]
    num_cached_tokens: int


def score_requests(prompts: Any, continuations: Any, prefixed: PrefixedPrompts) -> list[NewRequest]:
    """One request per pair of prompt and continuation, see `LLM.score`.

    `score_output` reads the score from the request's finished output.

    Raises:
        InvalidRequestError: prompts and continuations do not form valid pairs.
    """
    contexts, ends = split_prompts(prompts), split_prompts(continuations)
    if len(contexts) == 1:
        contexts = contexts * len(ends)
    if len(contexts) != len(ends):
        raise InvalidRequestError(
            f"{len(contexts)} prompts for {len(ends)} continuations; give one prompt, or one for "
            "each continuation"
        )
    pairs = [_pair(i, *pair) for i, pair in enumerate(zip(contexts, ends, strict=True))]
    texts = [(a.text, a.text + b.text) for a, b in pairs if a.text is not None and b.text]
    rows = iter(prefixed.encode_texts([text for pair in texts for text in pair]) if texts else ())
    requests = []
    for i, (context, end) in enumerate(pairs):
        if context.text is not None:
            before, whole = next(rows), next(rows)
            start = len(common_prefix(before, whole))
        else:
            assert context.token_ids is not None
            assert end.token_ids is not None
            start, whole = len(context.token_ids), [*context.token_ids, *end.token_ids]
        if not 1 <= start < len(whole):
            missing = "prompt" if start < 1 else "continuation"
            raise InvalidRequestError(
                f"pair {i}: the {missing} has no token of its own; give at least one"
            )
        options = {"logprob_start_len": start}
        requests.append(NewRequest(Prompt(None, whole), _PARAMS, options=options))
    return requests


def score_output(request: NewRequest, output: RequestOutput) -> ScoreOutput:
    """The score in the finished output of a request.

    Raises:
        InvalidRequestError: the request was refused.
    """
    if output.error is not None:
        raise output.error
    start = request.options["logprob_start_len"]
    tokens = output.prompt_token_ids[start:]
    assert output.prompt_logprobs is not None
    found = []
    for token, entry in zip(tokens, output.prompt_logprobs[start:], strict=True):
        assert entry is not None
        found.append(entry[token])
    return ScoreOutput(
        logprob=sum(each.logprob for each in found),
        is_greedy=all(each.rank == 1 for each in found),
        token_ids=tokens,
        token_logprobs=[each.logprob for each in found],
        num_cached_tokens=output.num_cached_tokens,
    )


def refuse_pooling(method: str) -> Never:
    """Refuse a method that needs a pooling model.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError(
        f"{method} needs a model that pools its hidden states, and no supported family does: they "
        "all generate; call generate, chat or score"
    )


def _pair(i: int, context: Any, end: Any) -> tuple[Prompt, Prompt]:
    found, after = parse_prompt(context), parse_prompt(end)
    if after.token_ids is None and not after.text:
        raise InvalidRequestError(
            f"pair {i}: the continuation is empty; give one character or more"
        )
    if (found.token_ids is None) != (after.token_ids is None):
        raise InvalidRequestError(
            f"pair {i}: give prompt and continuation both as text or both as token ids"
        )
    if found.token_ids is not None:  # token ids take precedence over a text
        found, after = Prompt(None, found.token_ids), Prompt(None, after.token_ids)
    return found, after
