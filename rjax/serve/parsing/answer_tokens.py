"""Finds the tokens of an output's content, for their logprobs."""

from collections.abc import Sequence

from rjax.outputs import CompletionOutput, TokenChance, token_chances
from rjax.serve.parsing.base import OutputParser


class AnswerTokens:
    """Takes the tokens of one output's content, in order, as they become known.

    A token that has any character of the content is one of its tokens, and so is the token that
    ends an output in its content. Tokens of reasoning, markers and the white space between are not.

    Args:
        parser: parser of the output; it must parse an output's text before `take` gets its tokens.
    """

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        # Start, end and logprobs of tokens of which it is not known what they belong to.
        self._waiting: list[tuple[int, int, list[TokenChance]]] = []

    def take(self, completion: CompletionOutput, ends: Sequence[int]) -> list[list[TokenChance]]:
        """The logprobs of the content's tokens that are known since the last call.

        Args:
            completion: new tokens, with logprobs.
            ends: end of each token so far, in characters of the text that the parser reads.
        """
        assert completion.logprobs is not None
        first = len(ends) - len(completion.token_ids)
        for i, entry in enumerate(token_chances(completion.logprobs), first):
            self._waiting.append((ends[i - 1] if i else 0, ends[i], entry))
        ended = completion.finish_reason is not None
        spans, parsed = self._parser.content_spans, self._parser.parsed
        entries: list[list[TokenChance]] = []
        count = 0
        for start, end, entry in self._waiting:
            # A token that is part of a character has no text until the character is complete.
            answers = any(
                (start < span.end or (span.is_open and ended))
                and (end > span.start or start == end == span.start)
                for span in spans
            )
            if not (answers or ended or (end <= parsed and start < parsed)):
                break
            count += 1
            if answers:
                entries.append(entry)
        del self._waiting[:count]
        return entries
