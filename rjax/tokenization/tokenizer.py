"""A model's tokenizer, loaded from a local Hugging Face folder without remote code."""

import copy
import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rjax.errors import InvalidRequestError, without_frames
from rjax.tokenization.chat import check_messages, check_template_kwargs
from rjax.tokenization.content_form import ContentForms, join_parts
from rjax.tokenization.detokenizer import (
    CONTEXT_TOKENS,
    REPLACEMENT,
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from rjax.tokenization.generation_config import GenerationConfig
from rjax.tokenization.loading import load_tokenizer
from rjax.tokenization.sentencepiece_detokenizer import (
    SentencePieceDecoder,
    SentencePieceDetokenizer,
    SentencePieceTexts,
)


class Tokenizer:
    """Converts text to token ids and back.

    Args:
        source: a folder with the tokenizer's files, whose code is never run; a tokenizer.json file;
            or a tokenizer object of ``transformers`` or ``tokenizers``.
        chat_template: Jinja source that replaces the tokenizer's template; rendered in a sandbox.
        model_folder: folder of generation_config.json and config.json, if it differs from
            ``source``.

    Attributes:
        source: folder or file that it was loaded from; None if it was made from an object.
        folder: the folder of ``source``; None if it is a file or an object.
        model_folder: folder of the generation config; None without one.
        hf: the tokenizer object of ``transformers``.

    Raises:
        InvalidConfigError: the tokenizer cannot be loaded, or the object is not a tokenizer.
    """

    def __init__(
        self,
        source: Any,
        *,
        chat_template: str | None = None,
        model_folder: str | pathlib.Path | None = None,
    ) -> None:
        self.hf, self.folder = load_tokenizer(source)
        self.source = str(source) if isinstance(source, str | pathlib.Path) else None
        found = self.model_folder = model_folder or self.folder
        self.generation = GenerationConfig.from_folder(found) if found else GenerationConfig()
        if chat_template is not None:
            self.hf = copy.copy(self.hf)
            self.hf.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer; the model's logits may be wider."""
        return len(self.hf)

    @functools.cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, from the tokenizer and the model's `GenerationConfig`."""
        own = self.hf.eos_token_id
        return self.generation.eos_token_ids | (frozenset() if own is None else {own})

    @property
    def bos_token_id(self) -> int | None:
        """Beginning-of-sequence (BOS) token; None if the model has none."""
        return self.hf.bos_token_id

    @property
    def bos_token(self) -> str | None:
        """Text of the BOS token."""
        return self.hf.bos_token

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` works without a ``chat_template`` argument."""
        return bool(self.hf.chat_template)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, repeat: bool = False
    ) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects.

        No special tokens are added to a text that already starts with the BOS token, such as the
        output of a chat template, unless ``repeat`` is set.

        Raises:
            InvalidRequestError: the text holds an unpaired surrogate.
        """
        return self.encode_batch([text], add_special_tokens, repeat=repeat)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, repeat: bool = False
    ) -> list[list[int]]:
        """`encode` for several texts at once, on all cores."""
        for text in texts:
            _check_text(text)
        bare = [
            not add_special_tokens or (not repeat and self._has_special_tokens(text))
            for text in texts
        ]
        found: list[list[int]] = [[] for _ in texts]
        for without in (False, True):
            rows = [i for i, b in enumerate(bare) if b is without]
            if rows:
                ids = self._ids([texts[i] for i in rows], add_special_tokens=not without)
                for i, row in zip(rows, ids, strict=True):
                    found[i] = row
        return found

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids outside the vocabulary are skipped."""
        ids = list(token_ids)
        backend = self._backend
        if backend is not None:
            return backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.hf.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Entries of the vocabulary, such as ``"Ġthe"`` or ``"▁the"``; empty for ids outside it."""
        return [piece or "" for piece in self.hf.convert_ids_to_tokens(list(token_ids))]

    @functools.cached_property
    def token_text(self) -> Callable[[int], str]:
        """Text of one token as in the middle of a text, including special tokens, for logprobs."""
        return functools.lru_cache(maxsize=1 << 16)(self._text_of)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of the text of one token, for logprobs. Those of a part of a character are known
        for tokens of bytes: of byte-level tokenizers, and <0xF0> of sentencepiece."""
        if self._is_byte_level:
            return self._token_bytes(token_id)
        text = self.token_text(token_id)
        if REPLACEMENT in text:
            byte = _BYTE_TOKEN.fullmatch(self.hf.convert_ids_to_tokens(token_id) or "")
            if byte is not None:
                return bytes.fromhex(byte.group(1))
        return text.encode()

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, such as BOS."""
        return token_id in self._special_ids

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """An incremental detokenizer of the tokens that follow the prompt."""
        if self._is_byte_level:
            if skip_special_tokens:
                return ByteLevelDetokenizer(self._visible_bytes, self._visible_text)
            return ByteLevelDetokenizer(self._token_bytes, self._whole_text)
        texts = self._visible_texts if skip_special_tokens else self._texts
        if texts is not None:
            return SentencePieceDetokenizer(texts, prompt_token_ids)
        hidden = self._special_ids if skip_special_tokens else frozenset()
        visible = (i for i in reversed(prompt_token_ids) if i not in hidden)
        return WindowDetokenizer(
            functools.partial(self.decode, skip_special_tokens=skip_special_tokens),
            list(itertools.islice(visible, CONTEXT_TOKENS))[::-1],
            frozenset() if spaces_between_special_tokens else self._special_ids,
        )

    def apply_chat_template(
        self,
        messages: object,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; tokenise it with ``add_special_tokens=False``.

        The template, by default the tokenizer's, runs in transformers' sandboxed Jinja environment.
        Never pass a template of an untrusted caller. It gets each content as it is given, a text or
        a list of parts, if it shows such; else in the other form.

        Raises:
            InvalidRequestError: the messages have a wrong shape, there is no template, or the
                template refuses the conversation.
        """
        checked = check_messages(messages)
        if chat_template is None and not self.has_chat_template:
            raise InvalidRequestError(
                "the tokenizer has no chat template; pass chat_template, or call generate with "
                "plain text"
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other; set "
                "add_generation_prompt=False to continue the last message"
            )
        extra = check_template_kwargs(chat_template_kwargs or {}, self.hf.apply_chat_template)
        if continue_final_message:
            last = checked[-1]["content"]
            text = last if isinstance(last, str) else join_parts(part["text"] for part in last)
            checked[-1] = {**checked[-1], "content": text}
        try:
            text = self.hf.apply_chat_template(
                self._content_forms(chat_template).apply(checked),
                tools=None if tools is None else [dict(tool) for tool in tools],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # the template may raise anything to refuse the messages
            without_frames(error)  # Jinja's traceback is a cycle that keeps the callers' frames
            raise InvalidRequestError(f"the chat template refused the messages: {error}") from error
        assert isinstance(text, str)
        return text

    @functools.cached_property
    def _content_forms(self) -> Callable[[str | None], ContentForms]:
        """What templates show of contents; those that callers pass are few."""

        @functools.lru_cache(maxsize=16)
        def of(chat_template: str | None) -> ContentForms:
            source = str(self.hf.chat_template) if chat_template is None else chat_template
            render = functools.partial(
                self.hf.apply_chat_template, chat_template=chat_template, tokenize=False
            )
            return ContentForms(source, render)

        return of

    def _ids(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        backend = self._backend
        if backend is None:
            return self.hf(
                texts,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )["input_ids"]
        # As transformers does, but without the offsets, which take half of the time.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != self.hf.split_special_tokens:
            backend.encode_special_tokens = self.hf.split_special_tokens
        found = backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    @property
    def is_fast(self) -> bool:
        """Whether the Rust tokenizers library does the work."""
        return self._backend is not None

    @functools.cached_property
    def added_tokens(self) -> dict[int, Any]:
        """Added tokens by id; they are matched in the raw text before other tokens."""
        return dict(self.hf.added_tokens_decoder)

    @functools.cached_property
    def _backend(self) -> Any:
        return getattr(self.hf, "backend_tokenizer", None)

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return self._backend is not None and type(self._backend.decoder).__name__ == "ByteLevel"

    @functools.cached_property
    def leading_special_text(self) -> str:
        """Text of the special tokens that `encode` puts before a text."""
        plain, special = (
            self.hf("a", add_special_tokens=flag, verbose=False)["input_ids"]
            for flag in (False, True)
        )
        for start in range(len(special)):
            if special[start : start + len(plain)] == plain:
                return "".join(self.hf.convert_ids_to_tokens(special[:start]))
        return ""

    def _has_special_tokens(self, text: str) -> bool:
        return bool(self.leading_special_text) and text.startswith(self.leading_special_text)

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self.added_tokens.items() if token.special)

    @functools.cached_property
    def _token_bytes(self) -> Any:
        return functools.lru_cache(maxsize=1 << 18)(self._bytes_of)

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._token_bytes(token_id)

    @functools.cached_property
    def _whole_text(self) -> Any:
        """The text of a token whose bytes are whole characters; None for others."""
        return functools.lru_cache(maxsize=1 << 18)(lambda i: _decoded(self._token_bytes(i)))

    @functools.cached_property
    def _visible_text(self) -> Any:
        return functools.lru_cache(maxsize=1 << 18)(lambda i: _decoded(self._visible_bytes(i)))

    @functools.cached_property
    def _texts(self) -> SentencePieceTexts | None:
        """Texts of all tokens; None if the decoder is not one of sentencepiece's."""
        backend = self._backend
        if backend is None or (decoder := SentencePieceDecoder.read(backend.decoder)) is None:
            return None
        return SentencePieceTexts(decoder, backend.id_to_token)

    @functools.cached_property
    def _visible_texts(self) -> SentencePieceTexts | None:
        """Texts of the tokens that are not special."""
        return None if self._texts is None else self._texts.without(self._special_ids)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(_BYTE_OF[c] for c in token)
        except KeyError:  # added tokens are stored as plain text
            return token.encode("utf-8")

    def _text_of(self, token_id: int) -> str:
        if self._is_byte_level:
            return self._token_bytes(token_id).decode("utf-8", errors="replace")
        # The decoder may strip the leading space of the first token: decode two copies.
        once = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(once) :]


def _decoded(text: bytes) -> str | None:
    """A text of whole characters; None for others."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """Bytes by the printable character that GPT-2 uses for them."""
    keep = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(b): b for b in keep}
    rest = (b for b in range(256) if b not in set(keep))
    return alphabet | {chr(256 + i): b for i, b in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds half of a surrogate pair at character {error.start}; give valid "
            "Unicode"
        ) from error
