"""The output of one sequence: tokens, text, logprobs, and its stop conditions."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from rjax.outputs import CompletionOutput, FinishReason, Logprob
from rjax.sampling import RequestOutputKind, SamplingParams
from rjax.tokenization import Detokenizer, OutputText, Tokenizer


@dataclasses.dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities at one position.

    Attributes:
        logprob: natural log of the sampled token's probability.
        rank: of the sampled token, 1 for the most likely.
        top_ids: the most likely tokens, best first.
        top_logprobs: theirs.
    """

    logprob: float
    rank: int
    top_ids: Int[np.ndarray, " top"]
    top_logprobs: Float[np.ndarray, " top"]


class Completion:
    """Collects a sequence's tokens and checks its stop conditions.

    A token that ends the sequence is kept in `token_ids`, without its text. The text of a stop
    string is removed unless the parameters include it. No sequence ends before ``min_tokens``
    tokens. The work per token is constant.

    Args:
        index: 0 to n-1 within the request.
        params: of the request.
        tokenizer: None if the engine serves token ids only; the text is then empty.
        eos_token_ids: tokens that end a sequence unless ``params.ignore_eos``.
        max_tokens: most tokens that the request and the model's length allow.
        prompt_token_ids: context for decoding the first tokens.
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
        self._include_stop = params.include_stop_str_in_output
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self._output = OutputText(params.stop_strings, include_stop=self._include_stop)
        self._num_logprobs = params.logprobs
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self._sent_tokens = 0

    @property
    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far, without an end that may become a stop string."""
        return self._output.text

    def append(self, token_id: int, logprobs: StepLogprobs | None = None) -> bool:
        """Add the next token; return whether the sequence is now finished.

        Args:
            token_id: sampled.
            logprobs: at its position; required if the parameters ask for them.
        """
        assert self.finish_reason is None, "a token after the end"
        tokens = self.token_ids
        tokens.append(token_id)
        count = len(tokens)
        if self._logprobs is not None:
            assert logprobs is not None, "logprobs were asked for"
            self._logprobs.append(
                logprob_entry(token_id, logprobs, self._num_logprobs, self._tokenizer)
            )
            self.cumulative_logprob += logprobs.logprob
        may_stop = count >= self._min_tokens
        if token_id in self._ends and may_stop:
            self._end_by_token(token_id, None if token_id in self._eos else token_id)
            return True
        if self._detokenizer is not None:
            new = self._detokenizer.push(token_id)
            stop = self._output.add(new, may_stop=may_stop)
            if stop is not None:
                self._finish("stop", stop)
                return True
        if count < self._max_tokens:
            return False
        self._finish_text()
        if self.finish_reason is None:
            self._finish("length", None)
        return True

    def abort(self) -> None:
        """End the sequence now; a finished one is unchanged."""
        if self.finish_reason is None:
            self._finish_text()
            if self.finish_reason is None:
                self.finish_reason = "abort"

    def snapshot(self, kind: RequestOutputKind) -> CompletionOutput:
        """The output so far, or with DELTA the part since the last DELTA."""
        if kind is RequestOutputKind.DELTA:
            start, self._sent_tokens = self._sent_tokens, len(self.token_ids)
            text = self._output.take()
        else:
            start, text = 0, self._output.text
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
        )

    def _end_by_token(self, token_id: int, reason: int | None) -> None:
        if self._include_stop and self._detokenizer is not None:
            self._output.add(self._detokenizer.push(token_id), may_stop=False)
        self._finish_text()
        if self.finish_reason is None:
            self._finish("stop", reason)

    def _finish_text(self) -> None:
        """Add the complete characters that the detokenizer held back."""
        if self._detokenizer is not None:
            may_stop = len(self.token_ids) >= self._min_tokens
            stop = self._output.add(self._detokenizer.flush(), may_stop=may_stop)
            if stop is not None:
                self._finish("stop", stop)
        self._output.close()

    def _finish(self, reason: FinishReason, stop: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop
        self._output.close()


def logprob_entry(
    token_id: int, step: StepLogprobs, limit: int | None, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """The output of one position: the token itself and the ``limit`` likeliest tokens.

    A negative limit or None takes all tokens of the step.
    """

    text = _no_text if tokenizer is None else tokenizer.token_text
    wanted = len(step.top_ids) if limit is None or limit < 0 else limit
    entry = {token_id: Logprob(step.logprob, step.rank, text(token_id))}
    ids, values = step.top_ids[:wanted].tolist(), step.top_logprobs[:wanted].tolist()
    for rank, (other, logprob) in enumerate(zip(ids, values, strict=True), start=1):
        if other != token_id:
            entry[other] = Logprob(logprob, rank, text(other))
    return entry


def _no_text(token_id: int) -> None:
    """The text of a token without a tokenizer."""
