"""The text of one sequence while its tokens come."""

from collections.abc import Sequence

from rjax.sampling import SamplingParams
from rjax.tokenization import OutputText, Tokenizer


class CompletionText:
    """Detokenises a sequence and finds its stop strings.

    The text of a stop string is removed unless the parameters include it, and so is that of the
    token that ends the sequence. No stop string counts before ``min_tokens`` tokens. The work per
    token is constant.

    Args:
        params: the request's parameters.
        tokenizer: the model's tokenizer.
        prompt_token_ids: context for decoding the first tokens.
    """

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
    ) -> None:
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._count = 0
        self._detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._output = OutputText(params.stop_strings, include_stop=self._include_stop)

    @property
    def text(self) -> str:
        """The text so far, without an end that may become a stop string."""
        return self._output.text

    def take(self) -> str:
        """The part of the text that was not taken before."""
        return self._output.take()

    def add(self, token_id: int) -> str | None:
        """Add the next token; return the stop string that it completes. Nothing comes after it."""
        self._count += 1
        new = self._detokenizer.push(token_id)
        stop = self._output.add(new, may_stop=self._count >= self._min_tokens)
        if stop is not None:
            self._output.close()
        return stop

    def stream(self, token_ids: list[int]) -> str:
        """`add` tokens and `take` their text, where there are no stop strings; quicker than both.
        `text` does not include it."""
        push = self._detokenizer.push
        return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))

    def end(self, token_id: int | None = None) -> str | None:
        """End the text with the complete characters that were held back.

        Args:
            token_id: the end-of-sequence or stop token that ends the sequence, if one does.

        Returns:
            The stop string that these characters complete.
        """
        if token_id is not None:
            self._count += 1
            if self._include_stop:
                self._output.add(self._detokenizer.push(token_id), may_stop=False)
        may_stop = self._count >= self._min_tokens
        stop = self._output.add(self._detokenizer.flush(), may_stop=may_stop)
        self._output.close()
        return stop
