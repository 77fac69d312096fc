"""Prompts that follow a shared prefix: a system prompt or a named prefix."""

import pathlib
from collections.abc import Sequence
from typing import Any

from rjax.api.prompts import Prompt, encode_texts, parse_prompt
from rjax.engine.protocol import NamedPrefix, PrefixEngine
from rjax.errors import InvalidRequestError, without_frames
from rjax.tokenization import SysPromptTokenizer, Tokenizer


class PrefixedPrompts:
    """Adds prefixes to an engine, and tokenises the prompts that follow them.

    A prefix given as text is joined with the prompt's text by the schema, and both are tokenised as
    one text. A prefix given as token ids is put before the prompt's token ids.

    Args:
        engine: holds the prefixes.
        schema: the template, see ``sys_schema`` in `rjax.config.RelaySettings`.
    """

    def __init__(self, engine: PrefixEngine, schema: str) -> None:
        self._engine = engine
        self._schema = schema
        self._system: SysPromptTokenizer | None = None
        self._named: dict[str, tuple[str, SysPromptTokenizer]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the engine.

        Raises:
            InvalidRequestError: the engine serves token ids only.
        """
        if self._engine.tokenizer is None:
            raise InvalidRequestError(
                "this engine has no tokenizer (skip_tokenizer_init); give prompts as token ids"
            )
        return self._engine.tokenizer

    def fill(self, prefix: str | Sequence[int] | None) -> None:
        """Replace the system prompt; see `LLM.fill_prefix_kv_cache`."""
        if prefix is None:
            self._system = None
            self._engine.set_shared_prefix([])
        elif isinstance(prefix, str):
            tokenizer = self._sys_prompt_tokenizer(prefix)
            self._engine.set_shared_prefix(tokenizer.shared_prefix_tokens)
            self._system = tokenizer
        else:
            prompt = parse_prompt(list(prefix))
            assert prompt.token_ids is not None
            self._engine.set_shared_prefix(prompt.token_ids)

    def add(self, name: str, prefix: str | Sequence[int], cache_salt: str | None) -> None:
        """Add a named prefix; see `LLM.add_prefix`."""
        if isinstance(prefix, str):
            tokenizer = self._sys_prompt_tokenizer(prefix)
            tokens = tokenizer.shared_prefix_tokens
            self._engine.add_prefix(name, tokens, cache_salt=cache_salt, text=prefix)
            self._named[name] = prefix, tokenizer
        else:
            self._engine.add_prefix(name, list(prefix), cache_salt=cache_salt)
            self._named.pop(name, None)

    def save(self, name: str, path: str | pathlib.Path) -> None:
        """Write a named prefix to a file; see `LLM.save_prefix`."""
        self._engine.save_prefix(name, path)

    def load(self, path: str | pathlib.Path, name: str | None, cache_salt: str | None) -> str:
        """Add a saved prefix and return its name; see `LLM.load_prefix`."""
        loaded = self._engine.load_prefix(path, name, cache_salt=cache_salt)
        self._named.pop(loaded.name, None)
        return loaded.name

    def drop(self, name: str) -> None:
        """Drop a named prefix; see `LLM.drop_prefix`."""
        self._engine.drop_prefix(name)
        self._named.pop(name, None)

    def names(self) -> list[str]:
        """Names of the prefixes, in the order of `add`."""
        return [prefix.name for prefix in self._engine.prefixes()]

    def salt(self, name: str) -> str | None:
        """The cache salt of a named prefix.

        Raises:
            InvalidRequestError: no prefix has this name.
        """
        return self._find(name).cache_salt

    def encode(
        self, items: Sequence[Any], name: str | None = None
    ) -> "list[Prompt | InvalidRequestError]":
        """Token ids of prompts in any form, with their prefix.

        Args:
            items: prompts as `LLM.generate` takes them.
            name: name of a named prefix; None for the system prompt, if there is one.

        Returns:
            One entry per item: the prompt, or the error that refuses it.

        Raises:
            InvalidRequestError: no prefix has this name, or text prompts cannot follow it.
        """
        found: list[Prompt | InvalidRequestError] = []
        for item in items:
            try:
                found.append(parse_prompt(item))
            except InvalidRequestError as error:
                found.append(without_frames(error))
        named = None if name is None else self._find(name)
        tokenizer = self._system if named is None else self._tokenizer_of(named)
        if any(isinstance(p, Prompt) and p.token_ids is None for p in found):
            found = encode_texts(found, (tokenizer or self.tokenizer).encode_batch)
        if named is None or tokenizer is not None:
            return found
        return [
            Prompt(p.text, [*named.token_ids, *(p.token_ids or [])]) if isinstance(p, Prompt) else p
            for p in found
        ]

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts that follow the system prompt; a text may be empty.

        Raises:
            InvalidRequestError: a text is not valid Unicode, or there is no tokenizer.
        """
        return (self._system or self.tokenizer).encode_batch(texts)

    def _find(self, name: str) -> NamedPrefix:
        for prefix in self._engine.prefixes():
            if prefix.name == name:
                return prefix
        known = ", ".join(map(repr, self.names())) or "none"
        raise InvalidRequestError(f"no prefix is named {name!r}; there are: {known}")

    def _tokenizer_of(self, prefix: NamedPrefix) -> SysPromptTokenizer | None:
        """The tokenizer of texts that follow a prefix; None for a prefix of token ids."""
        if prefix.text is None:
            return None
        text, tokenizer = self._named.get(prefix.name, (None, None))
        if tokenizer is None or text != prefix.text:
            tokenizer = self._sys_prompt_tokenizer(prefix.text)
            if tuple(tokenizer.shared_prefix_tokens) != tuple(prefix.token_ids):
                raise InvalidRequestError(
                    f"prefix {prefix.name!r} was saved with another sys_schema or tokenizer, which "
                    "give its text other tokens; use those, or add and save it again"
                )
            self._named[prefix.name] = prefix.text, tokenizer
        return tokenizer

    def _sys_prompt_tokenizer(self, text: str) -> SysPromptTokenizer:
        return SysPromptTokenizer(self.tokenizer, text, self._schema)
