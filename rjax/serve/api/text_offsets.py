"""Where the tokens of a completion start in its returned text, in characters."""

from collections.abc import Iterable, Sequence

from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer


class TextOffsets:
    """Computes where the tokens of one output start in the returned text, as they come.

    A token without text of its own, such as a hidden special token, starts where the next text
    does, and so do all tokens of a character that several tokens make.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: token ids of the prompt.
        params: the request's sampling parameters.
        start: characters of the returned text before the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        start: int,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._end = start

    def add(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push(token_id))
        return offsets


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> list[int]:
    """Offsets of a prompt's tokens in its text.

    Tokens that are not in the text, such as a BOS token that the tokenizer added, take no place.
    """
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    offsets = []
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        new = detokenizer.push(token_id)
        # Some decoders put a space between a special token and the text.
        found = next((form for form in (new, new.lstrip(" ")) if text.startswith(form, at)), None)
        if found is not None:
            at += len(found)
        elif not tokenizer.is_special(token_id):  # the tokenizer normalised the text
            at = min(at + len(new), len(text))
    return offsets
