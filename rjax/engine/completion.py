"""The output of one sequence: tokens, text, logprobs, and its stop conditions."""

import dataclasses
from collections.abc import Callable, Sequence

from rjax.engine.completion_text import CompletionText
from rjax.outputs import CompletionOutput, FinishReason, FlatLogprobs, Logprob
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities at one position.

    Attributes:
        logprob: natural log of the sampled token's probability.
        rank: rank of the sampled token, 1 for the most likely.
        top_ids: the most likely tokens, best first.
        top_logprobs: natural logs of the probabilities of ``top_ids``.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Completion:
    """Collects a sequence's tokens and checks its stop conditions.

    A token that ends the sequence is kept in `token_ids`, without its text. No sequence ends before
    ``min_tokens`` tokens. The work per token is constant.

    Args:
        index: 0 to n-1 within the request.
        params: the request's parameters.
        tokenizer: None if the engine serves token ids only; the text is then empty.
        eos_token_ids: tokens that end a sequence unless ``params.ignore_eos``.
        max_tokens: most tokens that the request and the model's length allow.
        prompt_token_ids: context for decoding the first tokens.
        weights_version: version of the weights.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        prompt_token_ids: Sequence[int] = (),
        weights_version: int = 0,
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: Exception | None = None
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._ends = self._eos.union(params.stop_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._text: CompletionText | None = None
        if tokenizer is not None and params.detokenize:
            self._text = CompletionText(params, tokenizer, prompt_token_ids)
        self._num_logprobs = params.logprobs
        self._logprobs: FlatLogprobs | None = None
        if params.logprobs is not None:
            self._logprobs = FlatLogprobs(token_texts(tokenizer))
        self.cumulative_logprob = 0.0
        self._sent_tokens = 0
        self._versions = [(0, weights_version)]  # of the weights, from a number of tokens on

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far, without an end that may become a stop string."""
        return "" if self._text is None else self._text.text

    def append(self, token_id: int, logprobs: StepLogprobs | None = None) -> bool:
        """Add the next token; return whether the sequence is now finished.

        Args:
            token_id: the sampled token.
            logprobs: log-probabilities at its position; required if the parameters ask for them.
        """
        assert self.finish_reason is None, "a token after the end"
        tokens = self.token_ids
        tokens.append(token_id)
        count = len(tokens)
        if self._logprobs is not None:
            assert logprobs is not None, "logprobs were asked for"
            add_position(self._logprobs, token_id, logprobs, self._num_logprobs)
            self.cumulative_logprob += logprobs.logprob
        if token_id in self._ends and count >= self._min_tokens:
            self._finish("stop", None if token_id in self._eos else token_id, token_id)
            return True
        if self._text is not None:
            stop = self._text.add(token_id)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return True
        if count < self._max_tokens:
            return False
        self._finish("length", None)
        return True

    def new_weights(self, version: int) -> None:
        """Take note that further tokens are computed with weights of this version."""
        if not self.token_ids:
            self._versions.clear()
        self._versions.append((len(self.token_ids), version))

    def abort(self) -> None:
        """End the sequence now; a finished one is unchanged."""
        if self.finish_reason is None:
            self._finish("abort", None)

    def stop(self) -> bool:
        """End the sequence as a stop string does; returns whether it was not finished."""
        if self.finish_reason is not None:
            return False
        self._finish("stop", None)
        return True

    def snapshot(self, kind: RequestOutputKind) -> CompletionOutput:
        """The output so far, or with DELTA the part since the last DELTA."""
        if kind is RequestOutputKind.DELTA:
            start, self._sent_tokens = self._sent_tokens, len(self.token_ids)
            text = "" if self._text is None else self._text.take()
        else:
            start, text = 0, self.text
        logprobs = self._logprobs
        # Positional arguments, for speed: one is made for every token of a stream.
        return CompletionOutput(
            self.index,
            text,
            self.token_ids[start:],
            None if logprobs is None else self.cumulative_logprob,
            None if logprobs is None else logprobs[start:],
            self.finish_reason,
            self.stop_reason,
            self.error,
            self._weights_versions(start),
        )

    def _weights_versions(self, start: int) -> list[int]:
        """The version of the weights of each token from number ``start`` on."""
        end, versions = len(self.token_ids), self._versions
        if len(versions) == 1:
            return [versions[0][1]] * (end - start)
        stops = [*(first for first, _ in versions[1:]), end]
        found: list[int] = []
        for (first, version), stop in zip(versions, stops, strict=True):
            found += [version] * (stop - max(first, start))
        return found

    def _finish(self, reason: FinishReason, stop: int | None, end_token: int | None = None) -> None:
        """End the sequence, unless its held-back text has a stop string, which ends it then."""
        found = None if self._text is None else self._text.end(end_token)
        self.finish_reason = reason if found is None else "stop"
        self.stop_reason = stop if found is None else found


def add_position(
    logprobs: FlatLogprobs, token_id: int, step: StepLogprobs, limit: int | None
) -> None:
    """Add one position: the token itself and the ``limit`` likeliest tokens.

    A negative limit or None takes all tokens of the step.
    """
    ids, values = step.top_ids, step.top_logprobs
    if limit is not None and limit >= 0:
        ids, values = ids[:limit], values[:limit]
    logprobs.add((token_id, step.logprob, step.rank), ids, values)


def logprob_entry(
    token_id: int, step: StepLogprobs, limit: int | None, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """One position alone, as `add_position` adds it."""
    found = FlatLogprobs(token_texts(tokenizer))
    add_position(found, token_id, step, limit)
    return next(iter(found))


def token_texts(tokenizer: Tokenizer | None) -> Callable[[int], str | None]:
    """The text of a token alone; None without a tokenizer."""
    return _no_text if tokenizer is None else tokenizer.token_text


def _no_text(token_id: int) -> None:
    """The text of a token without a tokenizer."""
