"""Counts reasoning tokens, for the usage."""

from bisect import bisect_left
from collections.abc import Sequence

from rjax.outputs import CompletionOutput
from rjax.sampling import SamplingParams
from rjax.serve.reasoning.base import OutputParser
from rjax.tokenization import Tokenizer


class ReasoningTokens:
    """Counts the tokens of one output between its reasoning markers.

    White space next to the markers counts; the markers and the token that ends the output do not. A
    token that contains a marker and reasoning text counts.

    Args:
        parser: of the output; it must parse an output's text before `add` gets its tokens.
        tokenizer: of the model.
        prompt_token_ids: of the prompt.
        params: of the request.
    """

    def __init__(
        self,
        parser: OutputParser,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._parser = parser
        self._detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._ends: list[int] = []  # end of each token, in characters of the output's text
        self._ended = False
        self._end_tokens = 0

    def add(self, completion: CompletionOutput) -> None:
        """Add the new tokens of an output."""
        ends = self._ends
        reached = ends[-1] if ends else 0
        most = self._parser.reasoning_limit
        for token in completion.token_ids:
            if most is not None and reached >= most:
                break  # no later token is reasoning
            reached += len(self._detokenizer.push(token))
            ends.append(reached)
        self._ended = completion.finish_reason is not None
        if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
            self._end_tokens = 1

    def count(self) -> int:
        """Number of tokens that are certain to be reasoning."""
        found = 0
        for start, end, is_open in self._parser.reasoning_spans:
            if is_open and self._ended:
                last = len(self._ends) - self._end_tokens
            elif end > start:
                last = min(bisect_left(self._ends, end) + 1, len(self._ends))
            else:
                continue
            found += max(0, last - self._first(start))
        return found

    def _first(self, start: int) -> int:
        """Index of the first token after the marker that ends at ``start``."""
        if start <= 0:
            return 0
        token = bisect_left(self._ends, start)
        return token + (token < len(self._ends) and self._ends[token] == start)
