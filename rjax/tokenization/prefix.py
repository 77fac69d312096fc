"""Tokenising texts that begin alike without tokenising that beginning each time, exactly."""

from collections.abc import Sequence

from rjax.tokenization.tokenizer import Tokenizer

_WORTH_SHARING = 256
"""Characters of a common beginning from which computing it once is worth the search for it."""


class PrefixTokenizer:
    """Tokenises texts that all begin with one prefix; the result is that of each whole text.

    Where the prefix ends in a special token at which the tokenizer splits any text, its tokens
    cannot depend on what follows and are computed once; otherwise every text is tokenised whole.

    Args:
        tokenizer: of the model.
        prefix: what every text begins with.
        add_special_tokens: as in `Tokenizer.encode`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prefix: str, *, add_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._special = add_special_tokens
        self.tokens = tokenizer.encode(prefix, add_special_tokens)
        """The prefix's own tokens."""
        self.has_hard_boundary = self._ends_in_hard_boundary()
        """Whether they are the same whatever follows."""

    def encode_batch(self, rests: Sequence[str]) -> list[list[int]]:
        """Token ids of the prefix followed by each rest."""
        if not self.has_hard_boundary:
            wholes = [self._prefix + rest for rest in rests]
            return self._tokenizer.encode_batch(wholes, self._special)
        boundary = self._tokenizer.added_tokens[self.tokens[-1]].content
        found = self._tokenizer.encode_batch([boundary + rest for rest in rests], False)
        return [self.tokens + tokens[1:] for tokens in found]

    def _ends_in_hard_boundary(self) -> bool:
        """Whether splitting right after the prefix provably changes no token.

        Added tokens are cut out of the raw text, leftmost and longest first, and what lies between
        is normalised and split piece by piece. So an added token at the very end of the prefix
        separates the sides, unless an added token could begin in the prefix and end after it, or
        the tokenizer looks at what follows (whole words only, tokens matched after normalising), or
        it puts tokens at the end of every text.
        """
        tokenizer, tokens, prefix = self._tokenizer, self.tokens, self._prefix
        last = tokenizer.added_tokens.get(tokens[-1]) if tokens else None
        if not tokenizer.is_fast or last is None:
            return False
        if last.normalized or last.single_word or last.rstrip:
            return False
        if not last.content or not prefix.endswith(last.content):
            return False
        if len(prefix) < len(tokenizer.beginning):
            return False
        for token in tokenizer.added_tokens.values():
            content = token.content
            if any(prefix.endswith(content[:k]) for k in range(1, len(content))):
                return False
        # Tokens that are put at the end of every text would show here.
        probe = tokenizer.encode(last.content + "a", add_special_tokens=False)
        if probe[:1] != tokens[-1:]:
            return False
        return tokenizer.encode(prefix + "a", self._special) == tokens + probe[1:]


def encode_shared_prefix(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """`Tokenizer.encode_batch`, faster where the texts have a long beginning in common.

    Conversations about one document do: their common beginning, up to its last special token, is
    tokenised once.
    """
    common = common_prefix(*texts) if len(texts) > 1 else ""
    if len(common) >= _WORTH_SHARING:
        ends = [
            common.rfind(token.content) + len(token.content)
            for token in tokenizer.added_tokens.values()
            if token.content and token.content in common
        ]
        if ends and max(ends) >= _WORTH_SHARING:
            prefix = common[: max(ends)]
            sharing = PrefixTokenizer(tokenizer, prefix, add_special_tokens=add_special_tokens)
            if sharing.has_hard_boundary:
                return sharing.encode_batch([text[len(prefix) :] for text in texts])
    return tokenizer.encode_batch(texts, add_special_tokens)


def common_prefix[S: (str, list[int])](*sequences: S) -> S:
    """The longest beginning that one or more texts, or lists of token ids, share."""
    first, last = min(sequences), max(sequences)  # whatever lies between begins as these two do
    length = min(len(first), len(last))
    if first[:length] == last[:length]:
        return first[:length]
    return first[: next(i for i in range(length) if first[i] != last[i])]
