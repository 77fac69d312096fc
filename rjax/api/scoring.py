"""Log-likelihoods of given continuations."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Never

import numpy as np
from jaxtyping import Float32

from rjax.api.prefixed_prompts import PrefixedPrompts
from rjax.api.prompts import Prompt, parse_prompt, split_prompts
from rjax.api.request_runner import NewRequest, RequestRunner
from rjax.closing import SynchronizedClosable, synchronized
from rjax.config.logprobs_mode import SCORING_TEMPERATURES
from rjax.errors import InvalidRequestError
from rjax.outputs import Logprob, RequestOutput
from rjax.sampling import RequestOutputKind, SamplingParams, checks
from rjax.tokenization import common_prefix

_PARAMS = SamplingParams(
    temperature=0,
    max_tokens=1,
    prompt_logprobs=0,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


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


class Scoring(SynchronizedClosable):
    """The calls of `LLM` that score given tokens."""

    _prompts: PrefixedPrompts
    _runner: RequestRunner

    @synchronized
    def score(
        self, prompts: Any, continuations: Any, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[ScoreOutput]:
        """The log-likelihood of each continuation of its prompt. A prefix that several prompts
        share is computed once, so that several choices for one question cost little more than one.

        Args:
            prompts: one prompt for all continuations, or one for each; forms as in `generate`. An
                empty text is the model's BOS token alone.
            continuations: texts for prompts of text, token ids for prompts of token ids. Prompt and
                continuation are tokenised as one text; a token that spans both belongs to the
                continuation.
            use_tqdm: see `generate`.

        Returns:
            One `ScoreOutput` per continuation, in the order of the continuations.

        Raises:
            InvalidRequestError: one of the pairs cannot be scored.
        """
        requests = score_requests(prompts, continuations, self._prompts)
        outputs = self._runner.run(requests, use_tqdm)
        return [score_output(*pair) for pair in zip(requests, outputs, strict=True)]

    @synchronized
    def get_per_token_logps(
        self,
        prompts: Any,
        completions: Any,
        *,
        temperature: float = 1.0,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[Float32[np.ndarray, " T"]]:
        """The log-probability of each token of each completion, by prefill, as trainers need it.

        The KV of a prompt is computed once for all its completions, or found in the prefix cache
        (``enable_prefix_caching``). Prompt and completion may fill ``max_model_len``.

        Args:
            prompts, completions: pairs as in `score`; completions of token ids without padding.
            temperature: divides the raw logits, 0.01 to 100. With that of `generate`, and without
                penalties and truncation there, the log-probabilities are those of
                ``logprobs_mode="processed_logprobs"`` within rounding.
            use_tqdm: see `generate`.

        Returns:
            One float32 array per completion, of its length, in the order of the completions.

        Raises:
            InvalidRequestError: one of the pairs cannot be scored, or the temperature is out of
                range.
        """
        requests = score_requests(prompts, completions, self._prompts, temperature=temperature)
        outputs = self._runner.run(requests, use_tqdm)
        return [per_token_logps(*pair) for pair in zip(requests, outputs, strict=True)]

    def embed(self, *given: Any, **options: Any) -> Never:
        """Not supported: no supported model family pools.

        Raises:
            InvalidRequestError: always.
        """
        refuse_pooling("LLM.embed")

    def encode(self, *given: Any, **options: Any) -> Never:
        """Not supported: no supported model family pools.

        Raises:
            InvalidRequestError: always.
        """
        refuse_pooling("LLM.encode")


def score_requests(
    prompts: Any, continuations: Any, prefixed: PrefixedPrompts, *, temperature: float = 1.0
) -> list[NewRequest]:
    """One request per pair of prompt and continuation, see `LLM.score`.

    `score_output` and `per_token_logps` read the scores from the request's finished output.

    Raises:
        InvalidRequestError: prompts and continuations do not form valid pairs, or the temperature
            is out of range.
    """
    temperature = checks.real("temperature", temperature, *SCORING_TEMPERATURES)
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
        options = {"logprob_start_len": start, "prompt_temperature": temperature}
        requests.append(NewRequest(Prompt(None, whole), _PARAMS, options=options))
    return requests


def score_output(request: NewRequest, output: RequestOutput) -> ScoreOutput:
    """The score in the finished output of a request.

    Raises:
        InvalidRequestError: the request was refused.
    """
    tokens, found = _scores(request, output)
    return ScoreOutput(
        logprob=sum(each.logprob for each in found),
        is_greedy=all(each.rank == 1 for each in found),
        token_ids=tokens,
        token_logprobs=[each.logprob for each in found],
        num_cached_tokens=output.num_cached_tokens,
    )


def per_token_logps(request: NewRequest, output: RequestOutput) -> Float32[np.ndarray, " T"]:
    """The log-probability of each token of the continuation in the finished output of a request.

    Raises:
        InvalidRequestError: the request was refused.
    """
    return np.array([each.logprob for each in _scores(request, output)[1]], np.float32)


def _scores(request: NewRequest, output: RequestOutput) -> tuple[list[int], list[Logprob]]:
    """The tokens of the continuation, and the log-probability of each."""
    if output.error is not None:
        raise output.error
    start = request.options["logprob_start_len"]
    tokens = output.prompt_token_ids[start:]
    assert output.prompt_logprobs is not None
    found = []
    for token, entry in zip(tokens, output.prompt_logprobs[start:], strict=True):
        assert entry is not None
        found.append(entry[token])
    return tokens, found


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
    if isinstance(end, Sequence | np.ndarray) and not isinstance(end, str) and not len(end):
        raise InvalidRequestError(f"pair {i}: the continuation is empty; give one token or more")
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
