"""The detokenizer for sentencepiece's decoders: any tokens, compared with decoding at once."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from rjax.tokenization import (
    ByteLevelDetokenizer,
    Detokenizer,
    SentencePieceDetokenizer,
    Tokenizer,
    WindowDetokenizer,
)
from rjax.tokenization.detokenizer import CONTEXT_TOKENS
from tests.properties import num_examples

from .tiny_tokenizers import KINDS

MARK = "\ufffd"
BYTES = [f"<0x{value:02X}>" for value in range(256)]
LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse())
STRIP = decoders.Strip(" ", 1, 0)
CHARACTERS = "a \n\u0301é한ع你🙂\U0010ffff"


def _mistral() -> tokenizers.Tokenizer:
    """Llama's decoder, and added tokens of every sort."""
    rust = KINDS["metaspace_first"]()
    rust.add_special_tokens(["[INST]", AddedToken("▁[/INST]", special=True, rstrip=True)])
    rust.add_tokens(
        [
            AddedToken("▁▁▁", normalized=True),
            AddedToken(" spaced ", normalized=False, lstrip=True),
            AddedToken("<|tool▁call|>", normalized=False),
            AddedToken("\u0301", normalized=False),
            AddedToken("<0xc3>", normalized=False),
        ]
    )
    return rust


def _unigram(decoder: Any) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "▁b", "a", "b", "é", "▁▁▁", "▁the", "a▁b", *BYTES]
    rust = tokenizers.Tokenizer(
        models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, True)
    )
    rust.normalizer = normalizers.Replace(" ", "▁")
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    rust.decoder = decoder
    rust.add_special_tokens(["<s>", "</s>"])
    return rust


SORTS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{kind: KINDS[kind] for kind in ("metaspace_normalizer", "gemma", "unigram")},
    "mistral": _mistral,
    "unigram_bytes": functools.partial(_unigram, decoders.Sequence([*LLAMA, STRIP])),
    "t5": functools.partial(_unigram, decoders.Metaspace()),
    "never": functools.partial(_unigram, decoders.Metaspace(prepend_scheme="never")),
    "two_replacements": functools.partial(
        _unigram, decoders.Sequence([decoders.Replace("▁t", "<0xC3>▁"), *LLAMA])
    ),
}


@functools.cache
def build(sort: str) -> Tokenizer:
    return Tokenizer(SORTS[sort]())


def window(tokenizer: Tokenizer, prompt: Sequence[int], skip: bool) -> WindowDetokenizer:
    """The detokenizer for any tokenizer, after a prompt whose end it can decode."""
    decode = functools.partial(tokenizer.decode, skip_special_tokens=skip)
    seen = [i for i in prompt if not (skip and tokenizer.is_special(i))][-CONTEXT_TOKENS:]
    assume(MARK not in decode(seen))
    return WindowDetokenizer(decode, seen)


def joined(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    ids = tokenizer.hf.convert_tokens_to_ids(list(tokens))
    assert tokenizer.pieces(ids) == list(tokens)
    return ids


@st.composite
def token_lists(draw: st.DrawFn, *, whole: bool) -> list[str | int]:
    """Byte tokens, spaces, special tokens and ids below 900; bytes make characters if `whole`."""
    character = st.sampled_from(CHARACTERS).map(lambda c: [BYTES[b] for b in c.encode()])
    other = st.integers(0, 900).map(lambda i: [i])
    spaces = st.sampled_from(["▁", "▁▁▁", "<s>", "</s>", "▁[/INST]"]).map(lambda t: [t])
    byte = st.sampled_from(BYTES).map(lambda t: [t])
    parts = (character, other, spaces) if whole else (character, other, spaces, byte)
    return [token for part in draw(st.lists(st.one_of(parts), max_size=7)) for token in part]


def known(tokenizer: Tokenizer, tokens: list[str | int]) -> list[int]:
    """The ids of a drawn list, less the tokens that the vocabulary lacks."""
    vocabulary = tokenizer.hf.get_vocab()
    ids = (vocabulary.get(t) if isinstance(t, str) else t for t in tokens)
    return [i for i in ids if i is not None]


def without_bytes(tokenizer: Tokenizer, tokens: list[str | int]) -> list[str | int]:
    """A drawn list less the byte tokens that were drawn as ids."""
    is_byte = re.compile("<0x..>").fullmatch
    return [t for t in tokens if isinstance(t, str) or not is_byte(tokenizer.pieces([t])[0])]


@pytest.mark.sample(3)
@pytest.mark.parametrize("sort", SORTS)
@settings(max_examples=num_examples(60))
@given(tokens=token_lists(whole=False), before=token_lists(whole=False), skip=st.booleans())
@example(tokens=["<0xC3>"] * 20 + ["▁"], before=[], skip=True)
@example(tokens=["<0xE4>", "<0xBD>", "</s>", "<0xA0>", "<0xC3>", "▁"], before=["<0x20>"], skip=True)
def test_any_tokens_decode_as_at_once(
    sort: str, tokens: list[str | int], before: list[str | int], skip: bool
) -> None:
    tokenizer = build(sort)
    ids, prompt = known(tokenizer, tokens), known(tokenizer, before)
    start = tokenizer.decode(prompt, skip_special_tokens=skip)
    if start.endswith(MARK):  # the output may complete a character of the prompt
        prompt, start = [], ""
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    assert isinstance(detokenizer, SentencePieceDetokenizer)
    shown = start + joined(detokenizer, ids)
    # What was shown of a run of bytes stays when a later byte makes all of the run invalid.
    assert all(a in (b, MARK) for a, b in zip(whole, shown, strict=False))
    assert set(whole[len(shown) :]) <= {MARK}
    assert len(shown) <= len(whole)


@pytest.mark.sample(3)
@pytest.mark.parametrize("sort", SORTS)
@settings(max_examples=num_examples(60))
@given(tokens=token_lists(whole=True), before=token_lists(whole=True), skip=st.booleans())
def test_whole_characters_come_as_from_a_window(
    sort: str, tokens: list[str | int], before: list[str | int], skip: bool
) -> None:
    tokenizer = build(sort)
    tokens, before = without_bytes(tokenizer, tokens), without_bytes(tokenizer, before)
    ids, prompt = known(tokenizer, tokens), known(tokenizer, before)
    detokenizer = window(tokenizer, prompt, skip)
    want = [detokenizer.push(i) for i in ids]
    assume(MARK not in "".join(want))  # it gives up after 8 tokens without text
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    assert [detokenizer.push(i) for i in ids] == want
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("sort", SORTS)
@settings(max_examples=num_examples(30))
@given(text=st.text(st.sampled_from(CHARACTERS) | st.characters(exclude_categories=["Cs"])))
def test_texts_come_whole(sort: str, text: str) -> None:
    tokenizer = build(sort)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = joined(tokenizer.detokenizer(), ids)
    assert shown == tokenizer.decode(ids)
    assert shown.rstrip(MARK) == joined(window(tokenizer, (), True), ids).rstrip(MARK)


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        (["<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "a"], ["", "", "", "🙂", "a"]),
        (["▁a", "<0x0A>", "▁b"], ["a", "\n", " b"]),
        (["<0xC3>", "b"], ["", MARK + "b"]),
        (["<0xC3>", "<0x41>", "<0x41>", "b"], ["", MARK * 2, MARK, "b"]),
        (["<0x41>", "<0xC3>", "b"], ["A", "", MARK + "b"]),
        (["<0xC3>", "<0xA9>", "<0xFF>", "b"], ["", "é", MARK * 2, "b"]),
        (["<0xC3>", "</s>", "<0xA9>"], ["", "", "é"]),
        (["<0xC3>", "b", "<0xA9>"], ["", MARK + "b", MARK]),
        (["▁", "▁", "▁b"], ["", " ", " b"]),
        (["<0x20>", "▁b"], ["", " b"]),
        (["<0x20>", "<0xC3>", "b"], ["", "", MARK * 2 + "b"]),
        (["<0xC3>", "▁b"], ["", MARK + " b"]),
    ],
)
def test_text_of_each_token(tokens: list[str], texts: list[str]) -> None:
    tokenizer = build("unigram_bytes")
    ids = ids_of(tokenizer, tokens)
    push = tokenizer.detokenizer().push
    assert [push(i) for i in ids] == texts
    assert len("".join(texts)) == len(tokenizer.decode(ids))


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ([], ["▁b"], "b"),
        (["<s>"], ["▁b"], "b"),
        (["a"], ["▁b"], " b"),
        (["▁"], ["▁b"], " b"),
        (["<s>", "▁a", "</s>"], ["▁b"], " b"),
        (["a", "<0xF0>", "<0x9F>"], ["<0x99>", "<0x82>", "a"], "🙂a"),
        (["<0xF0>", "</s>", "<0x9F>"], ["<0x99>", "</s>", "<0x82>"], "🙂"),
        (["<0xC3>"], ["▁b"], " b"),
        (["<0xFF>"], ["<0x41>", "▁b"], MARK + " b"),
        (["<0xFF>", "b"], ["<0x41>"], "A"),
        (["<0xC3>", "<0xA9>"], ["<0xFF>"], MARK * 2),
    ],
)
def test_a_prompt_is_before_the_text(prompt: list[str], tokens: list[str], text: str) -> None:
    tokenizer = build("unigram_bytes")
    before, ids = ids_of(tokenizer, prompt), ids_of(tokenizer, tokens)
    assert joined(tokenizer.detokenizer(before), ids) == text


def test_added_tokens_are_spelled_as_by_the_library() -> None:
    tokenizer = build("mistral")
    tokens = ["▁▁▁", " spaced ", "[INST]", "▁[/INST]", "<|tool▁call|>", "<0xc3>", "<0xA9>"]
    ids = ids_of(tokenizer, tokens)
    for skip, special in ((True, ""), (False, "[INST] [/INST]")):
        for spaces in (True, False):
            detokenizer = tokenizer.detokenizer(
                skip_special_tokens=skip, spaces_between_special_tokens=spaces
            )
            shown = joined(detokenizer, ids)
            assert shown == f"   spaced {special}<|tool call|>é"
            assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


class Written:
    """A decoder written in Python, which has no state to read its steps from."""

    def decode_chain(self, tokens: list[str]) -> list[str]:
        return tokens


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [
        (decoders.ByteLevel(), ByteLevelDetokenizer),
        (decoders.Metaspace(), SentencePieceDetokenizer),
        (decoders.Metaspace("_", "first"), SentencePieceDetokenizer),
        (decoders.Sequence([*LLAMA, STRIP]), SentencePieceDetokenizer),
        (decoders.Sequence([*LLAMA]), SentencePieceDetokenizer),
        (decoders.Sequence([LLAMA[0], LLAMA[2], STRIP]), SentencePieceDetokenizer),
        (decoders.Sequence([*LLAMA, decoders.Strip(" ", 2, 0)]), WindowDetokenizer),
        (decoders.Sequence([*LLAMA, decoders.Strip(" ", 1, 1)]), WindowDetokenizer),
        (decoders.Sequence([*LLAMA, decoders.Strip("é", 1, 0)]), WindowDetokenizer),
        (decoders.Sequence([LLAMA[0], LLAMA[1], STRIP]), WindowDetokenizer),
        (decoders.Sequence([LLAMA[1], LLAMA[0], LLAMA[2]]), WindowDetokenizer),
        (decoders.Sequence([decoders.Replace(Regex("▁"), " "), *LLAMA]), WindowDetokenizer),
        (decoders.Sequence([decoders.Replace("", " "), *LLAMA]), WindowDetokenizer),
        (decoders.Sequence([decoders.Sequence([*LLAMA])]), WindowDetokenizer),
        (decoders.Sequence([]), WindowDetokenizer),
        (decoders.Sequence([decoders.ByteLevel()]), WindowDetokenizer),
        (decoders.WordPiece(), WindowDetokenizer),
        (decoders.Decoder.custom(Written()), WindowDetokenizer),
        (None, WindowDetokenizer),
    ],
)
def test_the_decoder_decides(decoder: Any, kind: type) -> None:
    tokenizer = Tokenizer(_unigram(None))
    tokenizer.hf.backend_tokenizer.decoder = decoder
    assert type(tokenizer.detokenizer()) is kind
    assert type(tokenizer.detokenizer([4], skip_special_tokens=False)) is kind


def test_each_kind_has_its_detokenizer(tokenizer: Tokenizer, request: Any) -> None:
    kind = request.node.callspec.params["tokenizer"]
    wanted = {"byte": ByteLevelDetokenizer, "stra": ByteLevelDetokenizer, "word": WindowDetokenizer}
    assert type(tokenizer.detokenizer()) is wanted.get(kind[:4], SentencePieceDetokenizer)
