"""What an engine with named prefixes offers."""

import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rjax.engine.named_prefixes.named_prefix import NamedPrefix
from rjax.tokenization import Tokenizer


@runtime_checkable
class PrefixEngine(Protocol):
    """The methods about prefixes of an engine; `rjax.engine.llm_engine.LLMEngine` has them.

    Every method raises EngineClosedError after the engine was closed.
    """

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer; None where the engine serves token ids only."""
        ...

    def set_shared_prefix(self, token_ids: Sequence[int]) -> None:
        """Compute the KV of a prefix without a name and pin it in place of the one before.

        An empty list only releases the one before. Raises the errors of ``add_prefix``.
        """
        ...

    def add_prefix(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        text: str | None = None,
    ) -> None:
        """Compute the KV of a prefix and pin it under a name, until it is dropped or replaced.

        Any number of prefixes live at once; prefixes that start with the same tokens share pages.
        A request is served from them when it starts with the same tokens, or when it names the
        prefix. Nothing is recompiled.

        The call runs engine steps until the prefix is computed. To go on serving other requests
        meanwhile, queue a request with ``keep_as`` instead.

        Args:
            name: 1 to 256 characters; a name in use gets the new tokens.
            token_ids: the tokens of the prefix.
            cache_salt: only requests with the same salt are served from it.
            text: the text that the tokens were made from; stored and saved with them.

        Raises:
            InvalidRequestError: a bad name or salt, too many tokens, or ids out of range.
            InvalidConfigError: the engine was made without a prefix cache.
            OutOfMemoryError: the rest of the pool would not hold a sequence of full length.
        """
        ...

    def drop_prefix(self, name: str) -> None:
        """Unpin a named prefix; its pages may be evicted from now on.

        Raises:
            InvalidRequestError: there is no prefix of this name.
        """
        ...

    def prefixes(self) -> list[NamedPrefix]:
        """The named prefixes, in the order in which they were added."""
        ...

    def save_prefix(self, name: str, path: str | pathlib.Path) -> None:
        """Write the tokens and the KV of a named prefix to a safetensors file.

        Raises:
            InvalidRequestError: there is no prefix of this name, or the file cannot be written.
        """
        ...

    def load_prefix(
        self, path: str | pathlib.Path, name: str | None = None, *, cache_salt: str | None = None
    ) -> NamedPrefix:
        """Pin a prefix that ``save_prefix`` wrote; nothing is computed.

        Args:
            path: path of the file.
            name: name of the prefix, see ``add_prefix``; None takes the name in the file.
            cache_salt: see ``add_prefix``.

        Raises:
            InvalidConfigError: the file is no prefix, or belongs to another model, dtype or page
                size; or it has too many tokens, or ids out of range.
            InvalidRequestError: a bad name or salt.
            OutOfMemoryError: see ``add_prefix``.
        """
        ...
