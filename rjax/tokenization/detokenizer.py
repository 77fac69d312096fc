"""Incremental detokenisation: constant work per token, complete characters only."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

REPLACEMENT = "\ufffd"

CONTEXT_TOKENS = 5
"""Prompt tokens kept as context, for decoders that add spaces depending on the previous token."""

_MAX_HELD_TOKENS = 8
"""Most tokens held back for an incomplete character (UTF-8 needs at most 4 bytes, 4 tokens)."""


@runtime_checkable
class Detokenizer(Protocol):
    """Turns a stream of token ids into text.

    The joined results of `push` are the text up to the last complete character. An incomplete
    character at the end of the stream is dropped.
    """

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it completes, possibly empty."""
        ...

    def flush(self) -> str:
        """End the stream; return the complete characters that are still held back."""
        ...


class ByteLevelDetokenizer:
    """Exact detokenizer for byte-level tokenizers such as GPT-2's.

    Args:
        token_bytes: bytes of a token; empty for a token without text.
        token_text: text of a token whose bytes are whole characters; None for others.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], token_text: Callable[[int], str | None]
    ) -> None:
        self._token_bytes = token_bytes
        self._token_text = token_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between = True  # two characters

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes."""
        if self._is_between and (text := self._token_text(token_id)) is not None:
            return text
        text = self._decoder.decode(self._token_bytes(token_id))
        self._is_between = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        """Return nothing: only an incomplete character can be held back."""
        return ""


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decodes a short window with and without the new token.

    The window starts a few tokens back, because decoders strip or insert spaces depending on
    position and neighbours. Text that ends in U+FFFD may be an incomplete character and is held
    back.

    Args:
        decode: token ids to text.
        context: the last few visible tokens of the prompt.
        joined: tokens without a space between two of them.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        context: Sequence[int] = (),
        joined: frozenset[int] = frozenset(),
    ) -> None:
        self._decode = decode
        self._joined = joined
        self._last = context[-1] if context else None
        self._window = list(context)
        self._read = len(self._window)
        self._shown = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes."""
        new = self._push(token_id)
        if token_id in self._joined and self._last in self._joined:
            new = new.removeprefix(" ")
        self._last = token_id
        return new

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        waiting = len(self._window) - self._read
        if text.endswith(REPLACEMENT) and waiting < _MAX_HELD_TOKENS:
            return ""
        new = self._after_shown(text)
        if not new:
            if waiting >= _MAX_HELD_TOKENS:
                # Drop special tokens without text, to keep the visible context.
                del self._window[self._read :]
        else:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        """The held-back complete characters before an incomplete one."""
        if len(self._window) == self._read:
            return ""
        return self._after_shown(self._decode(self._window)).rstrip(REPLACEMENT)

    def _after_shown(self, text: str) -> str:
        if self._shown.endswith(REPLACEMENT) and not text.startswith(self._shown):
            # The context ended inside a character that is now complete.
            stem = self._shown.rstrip(REPLACEMENT)
            if text.startswith(stem):
                return text[len(stem) :]
        return text[len(self._shown) :]
