"""Tokens at the boundary of system prompt and user text equal those of the whole text."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rjax.errors import InvalidConfigError, InvalidRequestError
from rjax.tokenization import SysPromptTokenizer, Tokenizer, common_prefix, encode_shared_prefix
from tests.properties import num_examples

from .tiny_tokenizers import build

SYS, USR = "{__SYS_PROMPT}", "{__USR_PROMPT}"
SCHEMAS = (
    SYS + USR,
    f"<s>{SYS} {USR}",
    f"<|im_start|>{SYS}<|im_end|>{USR}<|im_end|>",
    f"<|im_start|>system\n{SYS}<|im_end|>\n<|im_start|>{USR}<|im_end|>\n<|im_start|>assistant\n",
    f"[INST] <<{SYS}>>\n\n{USR} [/INST]",
    f"<s>{USR}".replace(USR, SYS + "</s>" + USR),
)
FRAGMENTS = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "x",
    ">y",
    "\nQ",
    " ",
    "ab",
    "<",
    "\u0301",
)
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join),
)
QUICK = settings(
    max_examples=num_examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.sample(4)
@QUICK
@given(system=TEXT, users=st.lists(TEXT, min_size=1, max_size=3), schema=st.sampled_from(SCHEMAS))
def test_seam_tokens_equal_whole_tokens(
    tokenizer: Tokenizer, system: str, users: list[str], schema: str
) -> None:
    sys_tokenizer = SysPromptTokenizer(tokenizer, system, schema)
    found = sys_tokenizer.encode_batch(users)
    for user, tokens in zip(users, found, strict=True):
        whole = schema.replace(USR, "\0").replace(SYS, system).replace("\0", user)
        if "\0" not in system + user and USR not in system:
            assert sys_tokenizer.text(user) == whole
        # The oracle goes straight to transformers, around our own rules on the beginning token.
        bos = not (sys_tokenizer.text(user).startswith("<s>") and tokenizer.leading_special_text)
        assert tokens == tokenizer.hf(sys_tokenizer.text(user), add_special_tokens=bos)["input_ids"]
        assert sys_tokenizer.encode(user) == tokens


@pytest.mark.sample(4)
@QUICK
@given(system=TEXT, user=TEXT, schema=st.sampled_from(SCHEMAS))
def test_beginning_token_once_and_never_doubled(
    tokenizer: Tokenizer, system: str, user: str, schema: str
) -> None:
    sys_tokenizer = SysPromptTokenizer(tokenizer, system, schema)
    tokens, bos = sys_tokenizer.encode(user), tokenizer.bos_token_id
    whole = sys_tokenizer.text(user)
    in_text = tokenizer.encode(whole, add_special_tokens=False).count(bos)
    if tokenizer.leading_special_text:
        assert tokens[0] == bos
        expected = in_text if whole.startswith("<s>") else in_text + 1
    else:
        expected = in_text
    assert tokens.count(bos) == expected


@pytest.mark.sample(4)
@QUICK
@given(
    common=TEXT, rests=st.lists(TEXT, max_size=4), special=st.booleans(), repeat=st.integers(1, 90)
)
def test_texts_that_begin_alike_are_tokenised_as_each_alone(
    tokenizer: Tokenizer, common: str, rests: list[str], special: bool, repeat: int
) -> None:
    texts = [(common + "<|im_end|>") * repeat + rest for rest in rests]
    found = encode_shared_prefix(tokenizer, texts, special)
    assert found == [tokenizer.encode(text, special) for text in texts]


def test_fast_path_is_taken_where_it_should_be_and_nowhere_else(tokenizer: Tokenizer) -> None:
    after_special = SysPromptTokenizer(tokenizer, "A table.", f"{SYS}<|im_end|>{USR}")
    after_text = SysPromptTokenizer(tokenizer, "A table.", f"{SYS}\n{USR}")
    assert not after_text.has_hard_boundary
    appends = tokenizer.encode("a")[-1] == tokenizer.hf.eos_token_id
    straddled = "<|im_end|>x" in tokenizer.hf.get_vocab()
    assert after_special.has_hard_boundary == (not appends and not straddled)


def test_shared_prefix_tokens_begin_ordinary_requests(tokenizer: Tokenizer) -> None:
    for schema in SCHEMAS:
        sys_tokenizer = SysPromptTokenizer(tokenizer, "The quick brown fox. Name: Ann", schema)
        shared = sys_tokenizer.shared_prefix_tokens
        assert len(shared) >= 3
        for user in ("What is the age of Ann?", " leading space", "1", "中文"):
            assert sys_tokenizer.encode(user)[: len(shared)] == shared


def test_system_prompt_may_hold_the_placeholders(byte_level: Tokenizer) -> None:
    sys_tokenizer = SysPromptTokenizer(byte_level, f"about {USR}", f"<s>{SYS}|{USR}.")
    assert sys_tokenizer.text(SYS) == f"<s>about {USR}|{SYS}."


def test_schema_must_have_both_places(byte_level: Tokenizer) -> None:
    for schema in (SYS, USR, USR + SYS, SYS + USR + USR, ""):
        with pytest.raises(InvalidConfigError):
            SysPromptTokenizer(byte_level, "s", schema)


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        SysPromptTokenizer(byte_level, "s", SYS + USR).encode("a\ud800")


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), min_size=1, max_size=4))
def test_common_prefix(lists: list[list[int]]) -> None:
    found = common_prefix(*lists)
    n = len(found)
    assert all(row[:n] == found for row in lists)
    longer = [row[: n + 1] for row in lists]
    assert any(len(row) == n for row in lists) or any(row != longer[0] for row in longer)


@pytest.mark.thorough
def test_added_token_across_the_seam() -> None:
    tokenizer = build("straddled")
    for user in ("x", ">y", "x>y", "\nQ"):
        for schema in (f"{SYS}<|im_end|>{USR}", f"{SYS}<|im_end|{USR}", f"<s>{SYS}</s>{USR}"):
            sys_tokenizer = SysPromptTokenizer(tokenizer, "A table", schema)
            assert sys_tokenizer.encode(user) == tokenizer.encode(sys_tokenizer.text(user))
