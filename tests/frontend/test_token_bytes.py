"""The bytes of single tokens, of which several may make one character."""

import pytest

from rjax.tokenization import Tokenizer

from .tiny_tokenizers import build

TEXT = "a🙂 bé你\U0010ffff!"


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_bos", "metaspace_first"])
def test_the_bytes_of_a_text_are_those_of_its_tokens(kind: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert any("\ufffd" in tokenizer.token_text(i) for i in ids), "no character is split"
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert joined.removeprefix(" ") == TEXT


def test_tokens_alone(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size + 2):
        text, found = tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        assert found.decode(errors="replace") == text or "\ufffd" in text
        assert "\ufffd" in text or found == text.encode()


def test_bytes_of_sentencepiece() -> None:
    tokenizer = build("metaspace_first")
    for token, value in (("<0xF0>", b"\xf0"), ("<0x0A>", b"\n"), ("<0x41>", b"A")):
        assert tokenizer.token_bytes(tokenizer.hf.convert_tokens_to_ids(token)) == value
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.token_bytes(bos) == b"<s>"
    assert tokenizer.is_special(bos)
    assert not tokenizer.is_special(tokenizer.hf.convert_tokens_to_ids("<0xF0>"))
