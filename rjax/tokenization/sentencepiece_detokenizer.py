"""Incremental detokenisation for decoders of sentencepiece models, such as Llama 2 and Gemma."""

import codecs
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from rjax.tokenization.detokenizer import REPLACEMENT

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f+][0-9A-Fa-f])>")  # what Rust reads as a hexadecimal u8
_ENDS = (
    ("ByteFallback", "Fuse", "Strip"),
    ("ByteFallback", "Fuse"),
    ("Fuse", "Strip"),
    ("Fuse",),
)
"""Steps of a decoder after its replacements, of which the text of each token is known."""


@dataclasses.dataclass(frozen=True)
class SentencePieceDecoder:
    """How the decoder of a tokenizer makes text of vocabulary entries.

    Attributes:
        replacements: patterns and what stands for them in the text, such as a space for ``▁``.
        first_replacements: replacements for the first token of a text.
        has_byte_tokens: whether ``<0xNN>`` is a byte, which others may complete to a character.
        stripped: character that is removed once from the start of a text; empty for none.
    """

    replacements: tuple[tuple[str, str], ...]
    first_replacements: tuple[tuple[str, str], ...]
    has_byte_tokens: bool = False
    stripped: str = ""

    @classmethod
    def read(cls, decoder: Any) -> "SentencePieceDecoder | None":
        """The steps of a decoder of ``tokenizers``; None if any of them is of another kind."""
        if decoder is None:
            return None
        try:
            state = json.loads(decoder.__getstate__())
        except Exception:  # the library raises bare Exceptions for decoders written in Python
            return None
        match state:
            case {"type": "Metaspace", "replacement": space, "prepend_scheme": scheme}:
                first = " " if scheme == "never" else ""
                return cls(((space, " "),), ((space, first),))
            case {"type": "Sequence", "decoders": steps}:
                return cls._read_sequence(steps)
        return None

    @classmethod
    def _read_sequence(cls, steps: list[dict[str, Any]]) -> "SentencePieceDecoder | None":
        replacements = []
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": new} if old:
                    replacements.append((old, new))
                case _:
                    break
        rest = steps[len(replacements) :]
        kinds = tuple(step["type"] for step in rest)
        if kinds not in _ENDS:
            return None
        stripped = ""
        if "Strip" in kinds:
            stripped, start, stop = (rest[-1][key] for key in ("content", "start", "stop"))
            if (start, stop) != (1, 0) or not stripped.isascii():
                return None
        read = tuple(replacements)
        return cls(read, read, "ByteFallback" in kinds, stripped)

    def piece(self, token: str, *, is_first: bool = False) -> str | bytes:
        """The text of a vocabulary entry, or the byte of a byte token."""
        for old, new in self.first_replacements if is_first else self.replacements:
            token = token.replace(old, new)
        if self.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(byte.group(1), 16),))
        return token


class SentencePieceTexts:
    """Texts of the tokens of one vocabulary, remembered.

    Args:
        decoder: the tokenizer's decoder.
        token: vocabulary entry of a token id; None for ids without text, such as hidden special
            tokens.
    """

    def __init__(self, decoder: SentencePieceDecoder, token: Callable[[int], str | None]) -> None:
        self.stripped = decoder.stripped
        self._decoder = decoder
        self._token = token
        remembered = functools.lru_cache(maxsize=1 << 18)
        self.piece: Callable[[int], str | bytes | None] = remembered(self._piece)
        """Text of a token, or the byte of a byte token; None for an id without text."""
        self.whole_text: Callable[[int], str | None] = remembered(self._whole_text)
        """Text of a token between two characters; None for a byte of a longer character."""

    def without(self, hidden: frozenset[int]) -> "SentencePieceTexts":
        """The texts where some tokens are without text."""
        token = self._token
        return SentencePieceTexts(self._decoder, lambda i: None if i in hidden else token(i))

    def first_piece(self, token_id: int) -> str | bytes | None:
        """`piece` of the first token of a text."""
        return self._piece(token_id, is_first=True)

    def _piece(self, token_id: int, *, is_first: bool = False) -> str | bytes | None:
        token = self._token(token_id)
        return None if token is None else self._decoder.piece(token, is_first=is_first)

    def _whole_text(self, token_id: int) -> str | None:
        piece = self._piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode() if piece.isascii() else None
        return piece or ""


class SentencePieceDetokenizer:
    """Exact detokenizer for the decoders that `SentencePieceDecoder` reads.

    Adjacent byte tokens are one run. The library decodes a run as a whole: if it is not valid UTF-8
    it becomes one U+FFFD for each of its bytes. Characters of a run are returned as soon as they
    are complete. If the run turns out to be invalid, they count as some of its U+FFFD, so that the
    text is as long as the library's.

    These decoders put no space between tokens, special or not.

    Args:
        texts: texts of the vocabulary's tokens.
        prompt_token_ids: tokens before the first one that is pushed.
    """

    def __init__(self, texts: SentencePieceTexts, prompt_token_ids: Sequence[int] = ()) -> None:
        self._texts = texts
        self._whole_text = texts.whole_text
        self._is_first = True
        self._stripped = texts.stripped  # empty once the text has begun
        self._held = b""  # incomplete character at the end of the run
        self._marks = 0  # U+FFFD still to return if the run is invalid
        self._is_invalid = False  # the run
        self._is_between = False  # two characters, of which neither depends on the other
        self._read_prompt(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes."""
        if self._is_between and (text := self._whole_text(token_id)) is not None:
            return text
        piece = (self._texts.first_piece if self._is_first else self._texts.piece)(token_id)
        if piece is None:
            return ""
        self._is_first = False
        text = self._add_byte(piece) if isinstance(piece, bytes) else self._add_text(piece)
        self._is_between = not (self._marks or self._stripped or self._is_invalid)
        return text

    def flush(self) -> str:
        """Return nothing: only an incomplete character can be held back."""
        return ""

    def _add_text(self, text: str) -> str:
        if self._held:
            text = REPLACEMENT * self._marks + text
        self._end_run()
        return self._strip_start(text)

    def _add_byte(self, byte: bytes) -> str:
        self._marks += 1
        if not self._is_invalid:
            self._held += byte
            try:
                text, used = codecs.utf_8_decode(self._held)
            except UnicodeDecodeError:
                self._is_invalid = True
                self._held = b""
            else:
                self._held = self._held[used:]
                text = self._strip_start(text)
                self._marks -= len(text)
                return text
        text = self._strip_start(REPLACEMENT * self._marks)
        self._marks = 0
        return text

    def _end_run(self) -> None:
        self._held = b""
        self._marks = 0
        self._is_invalid = False

    def _strip_start(self, text: str) -> str:
        """New text without what is stripped from the start of all text."""
        if text and self._stripped:
            text = text.removeprefix(self._stripped)
            self._stripped = ""
        return text

    def _read_prompt(self, prompt_token_ids: Sequence[int]) -> None:
        """Take in the start of the prompt, which may be stripped, and the run at its end."""
        piece = self._texts.piece
        end = len(prompt_token_ids)
        while end and not isinstance(piece(prompt_token_ids[end - 1]), str):
            end -= 1
        for token_id in itertools.islice(prompt_token_ids, end):
            if not (self._is_first or self._stripped):
                break
            self.push(token_id)
        self._end_run()
        for token_id in prompt_token_ids[end:]:
            self.push(token_id)
        if self._held:  # the prompt's text has begun, with the marks of these bytes
            self._marks, self._stripped = 0, ""
