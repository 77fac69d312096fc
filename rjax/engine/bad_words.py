"""Words that a request must not generate, as masks over its next tokens."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import UInt32

from rjax.errors import InvalidRequestError
from rjax.sampling import SamplingParams
from rjax.tokenization import Tokenizer


class BadWordsMask:
    """A `rjax.batch.token_mask.TokenMask` that prevents token sequences from being completed.

    Args:
        sequences: none empty, of ids below ``vocab_size``; the last token of each is forbidden
            after the others.
        vocab_size: width of the logits.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        self._last: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in sequences:
            self._last[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: list[int] = []
        self._all = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)

    @property
    def bitmask(self) -> UInt32[np.ndarray, " W"]:
        """The allowed tokens' bits."""
        bitmask = self._all.copy()
        for length in self._lengths:
            before = tuple(self._tail[-length:]) if length else ()
            for token in self._last.get(before, ()):
                bitmask[token // 32] &= ~np.uint32(1 << token % 32)
        return bitmask

    def accept(self, token_id: int) -> None:
        """Take a sampled token."""
        self._tail.append(token_id)
        del self._tail[: -self._lengths[-1] or None]


def bad_words_masks(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, eos: frozenset[int]
) -> list[BadWordsMask]:
    """A mask for each sample of a request with ``bad_words``; none if no word can be generated.

    As in vLLM, a word is forbidden as the tokenizer encodes it at the start of a text, and after a
    space if that encoding differs in its first token and has as many tokens. An encoding with a
    token beyond the logits is never generated and needs no mask.

    Raises:
        InvalidRequestError: there is no tokenizer, or no token would be allowed.
    """
    if tokenizer is None:
        raise InvalidRequestError(
            "bad_words need a tokenizer, and this engine was made without one"
        )
    found: list[list[int]] = []
    for word in params.bad_words or ():
        plain, spaced = (
            tokenizer.encode(space + word.lstrip(), add_special_tokens=False) for space in ("", " ")
        )
        found += [plain] if plain else []
        if len(spaced) == len(plain) and spaced[:1] != plain[:1]:
            found.append(spaced)
    if not found:
        raise InvalidRequestError("bad_words hold no token; give words that are written")
    found = [tokens for tokens in found if max(tokens) < vocab_size]
    if not found:
        return []
    forbidden = {tokens[-1] for tokens in found}
    if params.min_tokens:
        forbidden.update(token for token in params.suppressed_ids(eos) if token < vocab_size)
    allowed = params.allowed_token_ids
    if len(forbidden) >= vocab_size or (allowed is not None and forbidden.issuperset(allowed)):
        raise InvalidRequestError("bad_words leave no token that is allowed; give fewer")
    return [BadWordsMask(found, vocab_size) for _ in range(params.num_sequences)]
