"""Text that comes one token at a time equals text decoded at once."""

import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rjax.tokenization import Detokenizer, Tokenizer
from tests.properties import num_examples

from .tiny_tokenizers import build

QUICK = settings(
    max_examples=num_examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    """What each token adds; the flush last."""
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@QUICK
@given(text=TEXT, prompt=TEXT)
def test_stream_equals_decoding_at_once(tokenizer: Tokenizer, text: str, prompt: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer.detokenizer(), ids)
    assert "".join(pieces).rstrip("\ufffd") == tokenizer.decode(ids).rstrip("\ufffd")
    before = tokenizer.encode(prompt)
    after = "".join(stream(tokenizer.detokenizer(before), ids))
    whole = tokenizer.decode([*before, *ids])
    assert whole.endswith(after)
    assert (tokenizer.decode(before) + after).rstrip("\ufffd") == whole.rstrip("\ufffd")


@QUICK
@given(ids=st.lists(st.integers(0, 600), max_size=30), skip=st.booleans())
@example(ids=[174, 99], skip=False)
@pytest.mark.parametrize("kind", ["byte_level", "straddled"])
def test_byte_level_is_exact_for_any_tokens(kind: str, ids: list[int], skip: bool) -> None:
    tokenizer = build(kind)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    shown = "".join(stream(detokenizer, ids))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert whole.startswith(shown)
    assert set(whole[len(shown) :]) <= {"\ufffd"}
    # Python holds back the two first bytes of an encoded surrogate, which decode to two marks.
    assert len(whole) - len(shown) <= 2


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_first"])
def test_no_half_character_is_ever_shown(kind: str) -> None:
    tokenizer = build(kind)
    text = "a🙂b你c\U0010ffff🙃"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer, shown = tokenizer.detokenizer(), ""
    assert len(ids) > len(text), "the characters must be split over tokens"
    for token in ids:
        shown += detokenizer.push(token)
        assert text.startswith(shown)
    assert shown == text
    short = tokenizer.detokenizer()
    assert text.startswith("".join(stream(short, ids[:-1])))


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    ids = [*tokenizer.encode("ab", add_special_tokens=False), end]
    assert "<|im_end|>" not in "".join(stream(tokenizer.detokenizer(), ids))
    shown = stream(tokenizer.detokenizer(skip_special_tokens=False), ids)
    assert "".join(shown).endswith("<|im_end|>")


def test_special_tokens_joined_without_spaces() -> None:
    tokenizer = build("wordpiece")
    end = tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    for spaces, expected in ((True, "<|im_end|> <|im_end|>"), (False, "<|im_end|><|im_end|>")):
        detokenizer = tokenizer.detokenizer(
            skip_special_tokens=False, spaces_between_special_tokens=spaces
        )
        assert "".join(stream(detokenizer, [end, end])) == expected


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_always", "wordpiece"])
def test_work_per_token_does_not_grow(kind: str) -> None:
    tokenizer = build(kind)
    ids = tokenizer.encode("The quick brown fox 你好 ", add_special_tokens=False) * 400

    def seconds(part: list[int]) -> float:
        detokenizer = tokenizer.detokenizer()
        start = time.thread_time()
        stream(detokenizer, part)
        return time.thread_time() - start

    seconds(ids[:100])
    tenth = min(seconds(ids[: len(ids) // 10]) for _ in range(3))
    whole = min(seconds(ids) for _ in range(3))
    assert whole < 40 * tenth  # quadratic work would take a hundred times as long


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_always", "metaspace_first", "wordpiece"])
def test_text_of_one_token_keeps_its_space(kind: str) -> None:
    tokenizer = build(kind)
    text = "the lazy dog"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(map(tokenizer.token_text, ids)).strip() == text
    assert tokenizer.token_text(10**6) == ""
