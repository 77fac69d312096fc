"""Tokenising a user's text after a shared prefix, exactly as the whole text would be."""

from rjax.config import RelaySettings
from rjax.tokenization.tokenizer import Tokenizer

_SYS, _USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"
DEFAULT_SCHEMA = _SYS + _USR

_PROBES = ("a", "A", "1", " a", ".", "\n", "'s", "_", "中", "é", "\u0301", "🙂")
"""Beginnings of user text of each kind that tokenizers treat differently."""


class SeamTokenizer:
    """Lays out system prompt and user text by a schema and tokenises the two as one text.

    ``encode(user)`` always equals tokenising the whole text: no token is dropped or doubled at the
    seam, and the beginning token stands once, at the start. Where the prefix ends in a special
    token at which the tokenizer splits any text, the parts are independent, so the prefix's tokens
    are computed once and reused; everywhere else the whole text is tokenised.

    Args:
        tokenizer: of the model.
        sys_prompt: shared system prompt.
        sys_schema: template with one ``{__SYS_PROMPT}`` and after it one ``{__USR_PROMPT}``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sys_prompt: str,
        sys_schema: str = DEFAULT_SCHEMA,
    ) -> None:
        RelaySettings(sys_schema=sys_schema)  # checks the two places
        self._tokenizer = tokenizer
        before, self._suffix = sys_schema.split(_USR)
        self._prefix = before.replace(_SYS, sys_prompt)
        self._tokens = tokenizer.encode(self._prefix)
        self._hard = self._ends_in_hard_boundary()
        self._shared = self._tokens if self._hard else self._stable_tokens()

    @property
    def shared_prefix_text(self) -> str:
        """The text before the user's."""
        return self._prefix

    @property
    def shared_prefix_tokens(self) -> list[int]:
        """Leading tokens that requests have in common, to warm up and pin.

        The longest common beginning of the prefix alone and of the prefix with each of a few
        typical user texts. A user text that merges differently shares fewer of them; its tokens
        are right all the same.
        """
        return list(self._shared)

    @property
    def has_hard_boundary(self) -> bool:
        """Whether the prefix's tokens cannot depend on the text that follows."""
        return self._hard

    def text(self, user_text: str) -> str:
        """The whole prompt text of a request."""
        return self._prefix + user_text + self._suffix

    def encode(self, user_text: str) -> list[int]:
        """Token ids of the whole prompt text."""
        return self.encode_batch([user_text])[0]

    def encode_batch(self, user_texts: list[str]) -> list[list[int]]:
        """`encode` for several user texts at once."""
        if not self._hard:
            return self._tokenizer.encode_batch([self.text(user) for user in user_texts])
        boundary = self._tokenizer.added_tokens[self._tokens[-1]].content
        rests = self._tokenizer.encode_batch(
            [boundary + user + self._suffix for user in user_texts], add_special_tokens=False
        )
        return [self._tokens + rest[1:] for rest in rests]

    def _stable_tokens(self) -> list[int]:
        wholes = self._tokenizer.encode_batch([self.text(probe) for probe in _PROBES])
        return common_prefix(self._tokens, *wholes)

    def _ends_in_hard_boundary(self) -> bool:
        """Whether splitting right after the prefix provably changes no token.

        Added tokens are cut out of the raw text, leftmost and longest first, and what lies between
        is normalised and split piece by piece. So an added token at the very end of the prefix
        separates the sides, unless an added token could begin in the prefix and end in the user
        text, or the tokenizer looks at what follows (whole words only, tokens matched after
        normalising), or it puts tokens at the end of every text.
        """
        tokenizer = self._tokenizer
        last = tokenizer.added_tokens.get(self._tokens[-1]) if self._tokens else None
        if not tokenizer.is_fast or last is None:
            return False
        if last.normalized or last.single_word or last.rstrip:
            return False
        if not last.content or not self._prefix.endswith(last.content):
            return False
        if len(self._prefix) < len(tokenizer.beginning):
            return False
        for token in tokenizer.added_tokens.values():
            content = token.content
            if any(self._prefix.endswith(content[:k]) for k in range(1, len(content))):
                return False
        alone = tokenizer.encode(last.content, add_special_tokens=False)
        if alone != self._tokens[-1:]:
            return False
        # A token the tokenizer appends to every text would hide here: compare one request.
        probe = last.content + _PROBES[0] + self._suffix
        whole = tokenizer.encode(self.text(_PROBES[0]))
        return whole == self._tokens + tokenizer.encode(probe, add_special_tokens=False)[1:]


def common_prefix(first: list[int], *others: list[int]) -> list[int]:
    """The longest beginning that all lists share."""
    length = len(first)
    for other in others:
        length = min(length, len(other))
        while first[:length] != other[:length]:
            length = next(i for i in range(length) if first[i] != other[i])
    return first[:length]
