"""The tokens of an answer's content, whose logprobs a response gives."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.outputs import CompletionOutput, Logprob
from rjax.sampling import SamplingParams
from rjax.serve.parsing.reader import OutputReader
from rjax.serve.parsing.registry import REASONING_PARSERS, choose_output_format
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

from .test_reasoning_tokens import FIRST, PARTS, STARTS, encode, plain, special
from .tool_formats import TOOL_FORMATS

__all__ = ["plain", "special"]  # fixtures

PARAMS = SamplingParams(skip_special_tokens=False)


def taken(
    tokenizer: Tokenizer,
    parser: str,
    start: str,
    tokens: list[int],
    *,
    cuts: list[tuple[int, int]] | None = None,
) -> list[int]:
    """The indices of the content's tokens, which their logprobs carry.

    Args:
        tokenizer: of the model.
        parser: of its reasoning.
        start: of the answer.
        tokens: of the answer.
        cuts: tokens and characters of the outputs before the last one; what is shown of the text
            may be behind the tokens.
    """
    tags = SpecialTokens({token.content: i for i, token in tokenizer.added_tokens.items()})
    answers = choose_output_format(parser, TOOL_FORMATS["hermes"], "auto", tokenizer, tags)
    reader = OutputReader(answers, start, {}, tokenizer, [], PARAMS, every_token=True)
    text = tokenizer.decode(tokens, skip_special_tokens=False).rstrip("\ufffd")
    at, place = 0, 0
    found: list[int] = []
    for next_at, next_place in [*(cuts or ()), (len(tokens), len(text))]:
        last = (next_at, next_place) == (len(tokens), len(text))
        reason: Any = "length" if last else None
        entries = [{tokens[i]: Logprob(-float(i), 1)} for i in range(at, next_at)]
        output = CompletionOutput(
            0,
            text[place:next_place],
            tokens[at:next_at],
            logprobs=entries,
            finish_reason=reason,
        )
        reader.read(output)
        logprobs = [entry for (entry,) in reader.answer_logprobs(output)]
        new = [int(-logprob) for _, logprob, _ in logprobs]
        assert [token for token, _, _ in logprobs] == [tokens[i] for i in new]
        found += new
        at, place = next_at, next_place
        if last:
            break
    return found


FINAL = f"<|end|>{FIRST}<|channel|>final<|message|>"
CASES = [
    # parser, start of the answer, its parts, which of them are content
    ("qwen3", "undecided", ["<think>", "\nhm\n", "</think>", "Hi 🙂 é"], [3]),
    ("qwen3", "undecided", ["<think>", "hm", "</think>", "🙂!"], [3]),
    ("gemma4", "undecided", ["<|channel>", "thought\n", "hm", "<channel|>", "Hi"], [4]),
    ("qwen3", "undecided", ["Hi ", "there"], [0, 1]),
    ("qwen3", "inside", ["hm", "</think>", "Hi"], [2]),
    ("qwen3", "outside", ["Hi", "</think>", "Hi"], [0, 1, 2]),
    ("qwen3", "inside", ["hm, cut off \n"], []),
    ("deepseek_r1", "inside", ["hm é", "</think>", "Hi"], [2]),
    ("openai_gptoss", FIRST, ["<|channel|>analysis<|message|>hm", FINAL, "Hi 🙂"], [2]),
    ("openai_gptoss", FIRST, ["<|channel|>analysis<|message|>hm", FINAL, "Hi", "<|return|>"], [2]),
    ("openai_gptoss", f"{FIRST}<|channel|>final<|message|>", ["Hi"], [0]),
    ("openai_gptoss", FIRST, ["<|channel|>analysis<|message|>cut off"], []),
]


@pytest.mark.parametrize(("parser", "start", "parts", "content"), CASES)
def test_tokens_of_the_content(special, parser, start, parts, content):
    tokens = [encode(special, part) for part in parts]
    ends = [sum(map(len, tokens[: i + 1])) for i in range(len(parts))]
    expected = [i for part in content for i in range(ends[part] - len(tokens[part]), ends[part])]
    assert taken(special, parser, start, [t for part in tokens for t in part]) == expected


def test_white_space_between_is_neither(special):
    parts = [encode(special, part) for part in ("hm", "</think>", "\n\n", "Hi")]
    tokens = [token for part in parts for token in part]
    first = len(tokens) - len(parts[-1])
    assert taken(special, "qwen3", "inside", tokens) == list(range(first, len(tokens)))


def test_tags_of_several_tokens(plain):
    before = encode(plain, "hm</think>")
    after = encode(plain, "Hi")
    found = taken(plain, "qwen3", "inside", before + after)
    assert found == list(range(len(before), len(before + after)))


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
    whole = taken(tokenizer, parser, start, tokens)
    assert taken(tokenizer, parser, start, tokens, cuts=cuts) == whole
    assert whole == sorted(set(whole))
