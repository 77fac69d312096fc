"""The tokens of an answer's reasoning, counted for its usage."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.outputs import CompletionOutput, FinishReason
from rjax.sampling import SamplingParams
from rjax.serve.parsing.reader import OutputReader
from rjax.serve.parsing.registry import REASONING_PARSERS, choose_output_format
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .reasoning_model import write_reasoning_model
from .tool_formats import TOOL_FORMATS

FIRST = "<|start|>assistant"
PARAMS = SamplingParams(skip_special_tokens=False)


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    """A tokenizer without tokens for tags, which several tokens spell."""
    return Tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def special(tmp_path_factory) -> Tokenizer:
    """A tokenizer where the tags and harmony's markers are special tokens."""
    return Tokenizer(write_reasoning_model(tmp_path_factory.mktemp("special"), special=True))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def count(
    tokenizer: Tokenizer,
    parser: str,
    start: str,
    tokens: list[int],
    *,
    cuts: list[tuple[int, int]] | None = None,
    finish: FinishReason = "length",
    stop: int | str | None = None,
) -> int:
    """The count at the end of an answer.

    Args:
        tokenizer: of the model.
        parser: of its reasoning.
        start: of the answer.
        tokens: of the answer.
        cuts: tokens and characters of the outputs before the last one; what is shown of the text
            may be behind the tokens.
        finish, stop: why it ends.
    """
    tags = SpecialTokens({token.content: i for i, token in tokenizer.added_tokens.items()})
    answers = choose_output_format(parser, TOOL_FORMATS["hermes"], "auto", tokenizer, tags)
    reader = OutputReader(answers, start, {}, tokenizer, [], PARAMS)
    shown = tokens[:-1] if finish == "stop" and not isinstance(stop, str) else tokens
    text = tokenizer.decode(shown, skip_special_tokens=False).rstrip("\ufffd")
    at, place, found = 0, 0, 0
    for next_at, next_place in [*(cuts or ()), (len(tokens), len(text))]:
        last = (next_at, next_place) == (len(tokens), len(text))
        made: Any = (finish, stop) if last else (None, None)
        piece, new = text[place:next_place], tokens[at:next_at]
        reader.read(CompletionOutput(0, piece, new, finish_reason=made[0], stop_reason=made[1]))
        at, place = next_at, next_place
        assert reader.count_reasoning() >= found  # it never goes back
        found = reader.count_reasoning()
        if last:
            break
    return found


CASES = [
    # parser, start of the answer, its parts, which of them are reasoning
    ("qwen3", "undecided", ["<think>", "\nhm, so\n", "</think>", "\n\nHi </think>"], [1]),
    ("qwen3", "undecided", ["Hi ", "<think>", "no", "</think>"], []),
    ("qwen3", "inside", ["hm so", "</think>", "Hi"], [0]),
    ("qwen3", "inside", ["<think>", "hm so", "</think>", "Hi"], [1]),
    ("gemma4", "undecided", ["<|channel>", "thought\n", "hm so", "<channel|>", "Hi"], [2]),
    ("qwen3", "outside", ["hm so", "</think>", "Hi"], []),
    ("qwen3", "inside", ["hm, cut off \n"], [0]),
    ("qwen3", "inside", ["</think>", "Hi"], []),
    ("deepseek_r1", "inside", [" \n", "hm é", "</think>", "Hi"], [0, 1]),
    (
        "openai_gptoss",
        FIRST,
        ["<|channel|>analysis<|message|>", "hm so", f"<|end|>{FIRST}<|channel|>final<|message|>Hi"],
        [1],
    ),
    (
        "openai_gptoss",
        f"{FIRST}<|channel|>analysis<|message|>",
        ["hm", f"<|end|>{FIRST}<|channel|>analysis<|message|>", " so é", "<|end|>", "Hi"],
        [0, 2],
    ),
    ("openai_gptoss", f"{FIRST}<|channel|>final<|message|>", ["Hi"], []),
    ("openai_gptoss", FIRST, ["<|channel|>analysis<|message|>", "cut off"], [1]),
]


@pytest.mark.parametrize(("parser", "start", "parts", "thought"), CASES)
def test_tokens_between_the_marks(special, parser, start, parts, thought):
    tokens = [encode(special, part) for part in parts]
    expected = sum(len(tokens[i]) for i in thought)
    assert count(special, parser, start, [t for part in tokens for t in part]) == expected


def test_marks_of_several_tokens(plain):
    begin, thought, end, said = (
        encode(plain, part) for part in ("<think>", "hm, so", "</think>", "Hi")
    )
    assert len(end) > 1
    whole = begin + thought + end + said
    assert count(plain, "qwen3", "undecided", whole) == len(thought)
    # What looked like a mark at the end of an answer that was cut off is reasoning.
    cut = begin + thought + end[:-1]
    assert count(plain, "qwen3", "undecided", cut) == len(thought + end[:-1])
    assert count(plain, "qwen3", "inside", thought + end + said) == len(thought)


def test_the_end_of_an_answer(special):
    tokens = encode(special, "hm, so")
    eos = special.hf.eos_token_id
    assert count(special, "qwen3", "inside", [*tokens, eos], finish="stop") == len(tokens)
    for stop in ("so", "never shown"):  # a text ends it, and all tokens before were reasoning
        found = count(special, "qwen3", "inside", tokens, finish="stop", stop=stop)
        assert found == len(tokens)
    # A character that is not complete is shown to nobody, but its tokens were made.
    half = encode(special, "é")[:1]
    if special.decode(half) == "\ufffd":
        assert count(special, "qwen3", "inside", tokens + half) == len(tokens) + 1


PARTS = (
    *("<think>", "</think>", FIRST, "<|channel|>analysis<|message|>", "<|channel|>final"),
    *("<|message|>", "<|end|>", "hm", " so", "\n", " ", "é", "<", "</", "</think", "🙂"),
    *("<|channel>", "thought\n", "thou", "<channel|>"),
)
STARTS = {
    "openai_gptoss": (FIRST, "", f"{FIRST}<|channel|>analysis<|message|>"),
    **dict.fromkeys(("qwen3", "deepseek_r1", "gemma4"), ("inside", "undecided", "outside")),
}


@given(st.booleans(), st.sampled_from(REASONING_PARSERS), st.data())
def test_outputs_do_not_matter(plain, special, tags_are_tokens, parser, data):
    tokenizer = special if tags_are_tokens or parser == "openai_gptoss" else plain
    start = data.draw(st.sampled_from(STARTS[parser]))
    text = "".join(data.draw(st.lists(st.sampled_from(PARTS))))
    tokens = encode(tokenizer, text)
    places = st.lists(st.integers(0, len(tokens)), max_size=6).map(sorted)
    cuts = []
    shown = 0
    for at in data.draw(places):
        most = len(tokenizer.decode(tokens[:at], skip_special_tokens=False).rstrip("\ufffd"))
        shown = data.draw(st.integers(shown, max(shown, most)))
        cuts.append((at, shown))
    whole = count(tokenizer, parser, start, tokens)
    assert count(tokenizer, parser, start, tokens, cuts=cuts) == whole
    assert whole <= len(tokens)
