"""Tokens to text one at a time, in constant work a token and never half a character."""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

REPLACEMENT = "\ufffd"

CONTEXT_TOKENS = 5
"""Prompt tokens kept as context: enough for decoders that space a token by its neighbour."""

_LONGEST_WAIT = 8
"""Tokens held back at most for a character to complete (UTF-8 needs 4 bytes, so 4 tokens)."""


@runtime_checkable
class Detokenizer(Protocol):
    """Turns a stream of token ids into text.

    The texts that `push` returns, joined, are the text of the stream up to the last complete
    character; a character still open when the stream ends is never shown.
    """

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes, possibly none."""
        ...

    def flush(self) -> str:
        """End the stream; return complete characters still held back."""
        ...


class ByteLevelDetokenizer:
    """Exact, for byte-level tokenizers (GPT-2's kind), whose tokens are runs of bytes.

    Args:
        token_bytes: bytes of a token; empty for one that shows no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """Nothing: what is held back is an incomplete character."""
        return ""


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of tokens with and without the new one.

    The window starts a few tokens back, because decoders strip or insert spaces by position and
    neighbour. Text that ends in U+FFFD may be an incomplete character and waits for more tokens.

    Args:
        decode: token ids to text.
        context: the last few visible tokens before the stream, i.e. of the prompt.
        joined: tokens that follow one another without a space between.
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
        if text.endswith(REPLACEMENT) and waiting < _LONGEST_WAIT:
            return ""
        new = self._after_shown(text)
        if not new:
            if waiting >= _LONGEST_WAIT:
                # Special tokens that show nothing; the visible context must stay.
                del self._window[self._read :]
        else:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        """Complete characters that stand before an incomplete one."""
        if len(self._window) == self._read:
            return ""
        return self._after_shown(self._decode(self._window)).rstrip(REPLACEMENT)

    def _after_shown(self, text: str) -> str:
        if self._shown.endswith(REPLACEMENT) and not text.startswith(self._shown):
            # The context itself ended inside a character that is now complete.
            stem = self._shown.rstrip(REPLACEMENT)
            if text.startswith(stem):
                return text[len(stem) :]
        return text[len(self._shown) :]
