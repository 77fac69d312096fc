"""Tokenise user texts after a shared system prompt, exactly as the joined text would be."""

from rjax.config import RelaySettings
from rjax.tokenization.prefix import PrefixTokenizer, common_prefix
from rjax.tokenization.tokenizer import Tokenizer

_SYS, _USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"
DEFAULT_SCHEMA = _SYS + _USR

_PROBES = ("a", "A", "1", " a", ".", "\n", "'s", "_", "中", "é", "\u0301", "🙂")
"""Starts of user texts, one of each kind that tokenizers treat differently."""


class SysPromptTokenizer:
    """Joins system prompt and user text by a schema and tokenises them as one text.

    ``encode(user)`` always equals tokenising the whole text: no token is dropped or duplicated at
    the boundary, and the BOS token appears once, at the start. `PrefixTokenizer` describes when the
    prefix's tokens are computed only once.

    Args:
        tokenizer: the model's tokenizer.
        sys_prompt: shared system prompt.
        sys_schema: template with one ``{__SYS_PROMPT}`` and after it one ``{__USR_PROMPT}``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sys_prompt: str,
        sys_schema: str = DEFAULT_SCHEMA,
    ) -> None:
        RelaySettings(sys_schema=sys_schema)  # checks the placeholders
        before, self._suffix = sys_schema.split(_USR)
        self._prefix = before.replace(_SYS, sys_prompt)
        self._tokens = PrefixTokenizer(tokenizer, self._prefix)
        self._shared = self._stable_tokens(tokenizer)

    @property
    def shared_prefix_text(self) -> str:
        """The text before the user's text."""
        return self._prefix

    @property
    def shared_prefix_tokens(self) -> list[int]:
        """Leading tokens that requests have in common; the engine computes and pins their KV.

        This is the longest common prefix of the tokens of the prefix alone and of the prefix with
        each of a few typical user texts. A user text that merges differently shares fewer tokens
        but is still tokenised correctly.
        """
        return list(self._shared)

    @property
    def has_hard_boundary(self) -> bool:
        """Whether the prefix's tokens are independent of the text that follows."""
        return self._tokens.has_hard_boundary

    def text(self, user_text: str) -> str:
        """The whole prompt text of a request."""
        return self._prefix + user_text + self._suffix

    def encode(self, user_text: str) -> list[int]:
        """Token ids of the whole prompt text."""
        return self.encode_batch([user_text])[0]

    def encode_batch(self, user_texts: list[str]) -> list[list[int]]:
        """`encode` for several user texts at once."""
        return self._tokens.encode_batch([user + self._suffix for user in user_texts])

    def _stable_tokens(self, tokenizer: Tokenizer) -> list[int]:
        if self._tokens.has_hard_boundary:
            return self._tokens.tokens
        wholes = tokenizer.encode_batch([self.text(probe) for probe in _PROBES])
        return common_prefix(self._tokens.tokens, *wholes)
