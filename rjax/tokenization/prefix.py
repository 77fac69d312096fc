"""Tokenise texts with a common prefix exactly, tokenising the prefix only once."""

from collections.abc import Sequence

from rjax.tokenization.tokenizer import Tokenizer

_MIN_SHARED_CHARS = 256
"""Shortest common prefix, in characters, that is worth tokenising separately."""


class PrefixTokenizer:
    """Tokenises texts that start with one prefix; the result equals that of the whole text.

    If the prefix ends in a special token at which the tokenizer always splits, its tokens are
    independent of the text that follows and are computed once. Otherwise every text is tokenised
    as a whole.

    Args:
        tokenizer: the model's tokenizer.
        prefix: text with which all texts start.
        add_special_tokens: see `Tokenizer.encode`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prefix: str, *, add_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._special = add_special_tokens
        self.tokens = tokenizer.encode(prefix, add_special_tokens)
        """Tokens of the prefix alone."""
        self.has_hard_boundary = self._ends_in_hard_boundary()
        """Whether these tokens are independent of the text that follows."""

    def encode_batch(self, suffixes: Sequence[str]) -> list[list[int]]:
        """Token ids of the prefix followed by each suffix."""
        if not self.has_hard_boundary:
            wholes = [self._prefix + suffix for suffix in suffixes]
            return self._tokenizer.encode_batch(wholes, self._special)
        boundary = self._tokenizer.added_tokens[self.tokens[-1]].content
        found = self._tokenizer.encode_batch([boundary + suffix for suffix in suffixes], False)
        return [self.tokens + tokens[1:] for tokens in found]

    def _ends_in_hard_boundary(self) -> bool:
        """Whether splitting right after the prefix provably changes no token.

        The tokenizer first splits the raw text at added tokens, leftmost and longest first, and
        then normalises and tokenises the text between them. An added token at the end of the prefix
        therefore separates the two sides, with three exceptions: another added token could start in
        the prefix and end after it; the added token's match depends on the following text
        (``single_word``, ``rstrip``, ``normalized``); the tokenizer appends tokens to every text.
        """
        tokenizer, tokens, prefix = self._tokenizer, self.tokens, self._prefix
        last = tokenizer.added_tokens.get(tokens[-1]) if tokens else None
        if not tokenizer.is_fast or last is None:
            return False
        if last.normalized or last.single_word or last.rstrip:
            return False
        if not last.content or not prefix.endswith(last.content):
            return False
        if len(prefix) < len(tokenizer.leading_special_text):
            return False
        for token in tokenizer.added_tokens.values():
            content = token.content
            if any(prefix.endswith(content[:k]) for k in range(1, len(content))):
                return False
        # Detects tokens that are appended to every text.
        probe = tokenizer.encode(last.content + "a", add_special_tokens=False)
        if probe[:1] != tokens[-1:]:
            return False
        return tokenizer.encode(prefix + "a", self._special) == tokens + probe[1:]


def encode_shared_prefix(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool = True
) -> list[list[int]]:
    """`Tokenizer.encode_batch`, faster for texts with a long common prefix.

    The common prefix up to its last special token is tokenised once, for example the document of
    several conversations about it.
    """
    common = common_prefix(*texts) if len(texts) > 1 else ""
    if len(common) >= _MIN_SHARED_CHARS:
        ends = [
            common.rfind(token.content) + len(token.content)
            for token in tokenizer.added_tokens.values()
            if token.content and token.content in common
        ]
        if ends and max(ends) >= _MIN_SHARED_CHARS:
            prefix = common[: max(ends)]
            sharing = PrefixTokenizer(tokenizer, prefix, add_special_tokens=add_special_tokens)
            if sharing.has_hard_boundary:
                return sharing.encode_batch([text[len(prefix) :] for text in texts])
    return tokenizer.encode_batch(texts, add_special_tokens)


def common_prefix[S: (str, list[int])](*sequences: S) -> S:
    """The longest common prefix of one or more texts or lists of token ids."""
    first, last = min(sequences), max(sequences)  # all others share the common prefix of these two
    length = min(len(first), len(last))
    if first[:length] == last[:length]:
        return first[:length]
    return first[: next(i for i in range(length) if first[i] != last[i])]
