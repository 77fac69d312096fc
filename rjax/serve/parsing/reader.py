"""Reads one output: its parts, and its reasoning tokens."""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

from rjax.outputs import CompletionOutput, TokenChance
from rjax.sampling import SamplingParams
from rjax.serve.parsing.answer_tokens import AnswerTokens
from rjax.serve.parsing.base import OutputDelta, OutputFormat
from rjax.serve.parsing.tags import SignedText
from rjax.serve.parsing.tools.base import Functions
from rjax.tokenization import Tokenizer


class OutputReader:
    """Splits one output into reasoning, content and calls, and counts its reasoning tokens.

    White space next to the reasoning markers counts; the markers and the token that ends the output
    do not. A token that contains a marker and reasoning text counts.

    Args:
        fmt: format of the model's outputs.
        start: start state of the output.
        functions: functions that may be called.
        tokenizer: the model's tokenizer.
        prompt_token_ids: the prompt's token ids.
        params: the request's sampling parameters.
        every_token: read all tokens, for `answer_logprobs`.
    """

    def __init__(
        self,
        fmt: OutputFormat,
        start: str,
        functions: Functions,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        every_token: bool = False,
    ) -> None:
        self._tags = fmt.tags
        self._parser = fmt.parser(start, functions)
        self._reads_tokens = fmt.reasons or bool(functions and fmt.tags)
        self._reads_calls = bool(functions)
        self._answer = AnswerTokens(self._parser) if every_token else None
        self._text = SignedText(
            fmt.tags,
            tokenizer.detokenizer(
                prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            ),
        )
        self._ended = False
        self._end_tokens = 0

    @property
    def num_calls(self) -> int:
        """Number of tool calls so far, including an incomplete one."""
        return self._parser.num_calls

    def read(self, completion: CompletionOutput) -> OutputDelta:
        """The parts of the output's next delta."""
        self._ended = completion.finish_reason is not None
        if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
            self._end_tokens = 1
        text = completion.text
        if self._reads_tokens:
            everything = self._reads_calls or self._answer is not None
            if everything or not self._is_after_reasoning():
                self._text.add(completion.token_ids)
            text = self._text.sign(text, ended=self._ended)
        return self._written_out(self._parser.feed(text, ended=self._ended))

    def answer_logprobs(self, completion: CompletionOutput) -> list[list[TokenChance]]:
        """Logprobs of the content's tokens; see `AnswerTokens.take`.

        Args:
            completion: the output that was read last, with logprobs.
        """
        assert self._answer is not None
        return self._answer.take(completion, self._text.ends)

    def count_reasoning(self) -> int:
        """Number of tokens that are certain to be reasoning."""
        ends = self._text.ends
        found = 0
        for start, end, is_open in self._parser.reasoning_spans:
            if is_open and self._ended:
                last = len(ends) - self._end_tokens
            elif end > start:
                last = min(bisect_left(ends, end) + 1, len(ends))
            else:
                continue
            found += max(0, last - self._first(start))
        return found

    def _is_after_reasoning(self) -> bool:
        """Whether no later token is reasoning."""
        limit = self._parser.reasoning_limit
        return limit is not None and (self._text.ends[-1] if self._text.ends else 0) >= limit

    def _first(self, start: int) -> int:
        """Index of the first token after the marker that ends at ``start``."""
        if start <= 0:
            return 0
        ends = self._text.ends
        token = bisect_left(ends, start)
        return token + (token < len(ends) and ends[token] == start)

    def _written_out(self, delta: OutputDelta) -> OutputDelta:
        """A delta with its tags as text, where the parser left them."""
        if not self._tags:
            return delta
        unsign = self._tags.unsign
        calls = [dataclasses.replace(c, arguments=unsign(c.arguments)) for c in delta.calls]
        return OutputDelta(unsign(delta.reasoning), unsign(delta.content), calls)
