"""Answers split into reasoning, content and calls, and what constrains each part."""

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rjax.errors import InvalidConfigError
from rjax.serve.parsing.base import OutputFormat
from rjax.serve.parsing.registry import REASONING_PARSERS, choose_output_format
from rjax.serve.parsing.tools.base import Functions
from rjax.serve.parsing.tools.parser import join_call_deltas
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar, grammar_special_tokens, grammar_tokenizer
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .reasoning_model import write_reasoning_model
from .tool_formats import TOOL_FORMATS

NAMES: Functions = dict.fromkeys(("find", "count"))
CALL = TOOL_FORMATS["hermes"].call_text("find", '{"a": "</think>"}')
FIRST = "<|start|>assistant"


@pytest.fixture(scope="session")
def plain() -> Tokenizer:
    """A tokenizer without tokens for tags, which are then text."""
    return Tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def tagged(tmp_path_factory) -> Tokenizer:
    """A tokenizer with <think> and </think>, as Qwen's has them: not special."""
    return Tokenizer(write_reasoning_model(tmp_path_factory.mktemp("tagged"), special=False))


@pytest.fixture(scope="session")
def special(tmp_path_factory) -> Tokenizer:
    """A tokenizer where these and harmony's are special tokens."""
    return Tokenizer(write_reasoning_model(tmp_path_factory.mktemp("special"), special=True))


@functools.cache
def llguidance_tokenizer(tokenizer: Tokenizer) -> Any:
    # Here <|end|> ends an answer, in the harmony format only a message.
    ends = [tokenizer.hf.get_vocab().get("<|return|>", tokenizer.hf.eos_token_id)]
    return grammar_tokenizer(tokenizer, tokenizer.vocab_size, ends)


def form(parser: str | None, tokenizer: Tokenizer, tools: str = "hermes") -> OutputFormat:
    named = "auto" if parser == "openai_gptoss" else tools
    special_tokens = grammar_special_tokens(
        tokenizer, llguidance_tokenizer(tokenizer), tokenizer.vocab_size
    )
    return choose_output_format(parser, TOOL_FORMATS[tools], named, tokenizer, special_tokens)


def read(
    answers: OutputFormat, start: str, pieces: list[str], names: Functions = NAMES
) -> tuple[str, str, list[tuple[str, str]]]:
    """The parts of a signed text."""
    parser = answers.parser(start, names)
    found = [parser.feed(text, ended=i == len(pieces) - 1) for i, text in enumerate(pieces)]
    calls = join_call_deltas(itertools.chain.from_iterable(piece.calls for piece in found))
    assert parser.num_calls == len(calls)
    unsign = answers.tags.unsign
    return (
        unsign("".join(piece.reasoning for piece in found)),
        unsign("".join(piece.content for piece in found)),
        [(call.name, unsign(call.arguments)) for call in calls],
    )


def forms(answers: OutputFormat, text: str) -> list[list[str]]:
    """A text whose tags are tokens, signed: whole, by character, and with an empty end."""
    signed = answers.tags.sign(text)
    return [[signed], list(signed), [*signed, ""]]


THINK_CASES = [
    # parser, end of the prompt, text, reasoning, content
    ("qwen3", "", "<think>\nhm\n</think>\n\nHi\n", "hm", "Hi\n"),
    ("qwen3", "", " \n<think>hm", "hm", ""),
    ("qwen3", "", "Hi <think>no</think>", "", "Hi <think>no</think>"),
    ("qwen3", "", " <thi", "", " <thi"),
    ("qwen3", "<think>\n", "hm </think> Hi", "hm", "Hi"),
    ("qwen3", "<think>\n", "<think> hm </think> Hi", "hm", "Hi"),  # the model repeats the tag
    ("qwen3", "<think>\n\n</think>\n\n", "Hi </think>", "", "Hi </think>"),
    ("qwen3", "", "<think>\n\n</think>\n\nHi", "", "Hi"),
    ("deepseek_r1", "", "hm </thi \n </think>Hi</think>", "hm </thi", "Hi</think>"),
    ("deepseek_r1", "", "<think>hm</think>", "hm", ""),
    ("deepseek_r1", "<think>\n", "hm", "hm", ""),
    ("deepseek_r1", "", " hm \n</think", "hm \n</think", ""),
    ("deepseek_r1", "<think></think>", "Hi", "", "Hi"),
    ("gemma4", "", "<|channel>thought\nhm\n<channel|>Hi\n", "hm", "Hi\n"),
    ("gemma4", "", "<|channel>thoughtful", "thoughtful", ""),
    ("gemma4", "", "<|channel>thought", "thought", ""),
    ("gemma4", "", "<|channel>hm<channel|>Hi", "hm", "Hi"),
    ("gemma4", "", "Hi <|channel>thought\n", "", "Hi <|channel>thought\n"),
    ("gemma4", "<|channel>thought\n", "hm<channel|>Hi", "hm", "Hi"),
    ("gemma4", "<|channel>thought\n<channel|>", "Hi", "", "Hi"),
    ("gemma4", "", "<|channel>thought\n<channel|>Hi", "", "Hi"),
]


@pytest.mark.parametrize(("parser", "tail", "text", "reasoning", "content"), THINK_CASES)
def test_reasoning_between_tags(tagged, parser, tail, text, reasoning, content):
    answers = form(parser, tagged)
    start = answers.start(f"<|assistant|>{tail}", None)
    for pieces in forms(answers, text):
        assert read(answers, start, pieces) == (reasoning, content, [])


def test_an_answer_that_goes_on(tagged):
    answers = form("deepseek_r1", tagged)
    for continued, expected in (
        ("<think>so", ("x", "y", [])),
        ("<think>so</think>a", ("", "x</think>y", [])),
        ("text", ("", "x</think>y", [])),
    ):
        signed = answers.tags.sign("x</think>y")
        assert read(answers, answers.start("", continued), [signed]) == expected


def test_calls_after_the_reasoning(tagged):
    answers = form("qwen3", tagged)
    text = f"<think>{CALL}</think>\nSo: {CALL}\n{CALL}"
    # The first </think> stands inside the call that is reasoned about.
    signed = answers.tags.sign(text)
    assert read(answers, "undecided", [signed])[0].startswith('<tool_call>\n{"name": "find"')
    text = f"<think>a call</think>\nSo: {CALL}\n{CALL}"
    call = ("find", '{"a": "</think>"}')
    for pieces in forms(answers, text):
        assert read(answers, "undecided", pieces) == ("a call", "So: ", [call, call])


ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
FINAL = f"{FIRST}<|channel|>final<|message|>Hi"
TO_FIND = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
LONG_NAME = f"<|channel|>{'x' * 600}"
HARMONY_CASES = [
    (FIRST, f"{ANALYSIS}{FINAL}<|return|>", "hm", "Hi", []),
    (FIRST, f"{ANALYSIS}{FINAL}", "hm", "Hi", []),
    (FIRST, f"{ANALYSIS}{FIRST}{ANALYSIS}{FINAL}", "hm\nhm", "Hi", []),
    (FIRST, f'{ANALYSIS}{FIRST}{TO_FIND}{{"a": 1}}<|call|>', "hm", "", [("find", '{"a": 1}')]),
    (
        FIRST,
        ' to=functions.find<|channel|>commentary <|constrain|>json<|message|>{"a": ',
        "",
        "",
        [("find", '{"a": ')],
    ),
    (
        FIRST,
        f"<|channel|>commentary<|message|>I look.<|end|>{FIRST}{TO_FIND}{{}}",
        "",
        "I look.",
        [("find", "{}")],
    ),
    (FIRST, f"{TO_FIND.replace('find', 'evil')}{{}}<|call|>", "", "{}", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|chann", "hm", "<|chann", []),
    (FIRST, "<|channel|>analysis<|message|>hm <|en", "hm <|en", "", []),
    (FIRST, "Hi, no channel", "", "Hi, no channel", []),
    (FIRST, "<think><|message|>", "", "<think><|message|>", []),
    (FIRST, f"{' ' * 600}Hi", "", f"{FIRST}{' ' * 600}Hi", []),
    (FIRST, "<|channel|>final<|message|>a<b <| c", "", "a<b <| c", []),
    (FIRST, f"{LONG_NAME}<|message|>", "", f"{LONG_NAME}<|message|>", []),
    ("", f"{FINAL}<|end|>lost", "", "Hi\nlost", []),
    (f"{FIRST}<|channel|>final<|message|>", "Hi", "", "Hi", []),
    # Headers without <|message|>, which end where the message does.
    (FIRST, f"<|channel|>analysis x<|end|>{FINAL}", "x", "Hi", []),
    (FIRST, f"<|channel|>analysis x{FINAL}", "x", "Hi", []),
    (FIRST, f"<|channel|>analysis<|end|>{FINAL}", "", "Hi", []),
    (FIRST, f"<|channel|>?? {FINAL}", "?? ", "Hi", []),
    (FIRST, f"<|channel|>commentary 2?<|end|>{FIRST}{ANALYSIS}{FINAL}", "2?\nhm", "Hi", []),
    (FIRST, f"<|channel|>commentary to=assistant<|channel|>commentary?{FINAL}", "?", "Hi", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>final Hi", "hm", "Hi", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>final Hi<|return|>", "hm", "Hi", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>final{'Hi ' * 300}", "hm", "Hi " * 300, []),
    (FIRST, f"<|channel|>final json {{}}<|end|>{FIRST}", "", "{}", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>final", "hm", "", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>commentary to=functions.fi", "hm", "", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|channel|>commentary t", "hm", "", []),
    (FIRST, f"{ANALYSIS}{FIRST}<|end|>{FINAL}", "hm", "Hi", []),
    (
        FIRST,
        f'{TO_FIND.removesuffix("<|message|>")}{{"a": 1}}<|call|>',
        "",
        "",
        [("find", '{"a": 1}')],
    ),
    (FIRST, f"<|channel|>commentary to=functions.find x<|end|>{FINAL}", "x", "Hi", []),
    (f"{FIRST}<|channel|>analysis", f" x<|end|>{FINAL}", "x", "Hi", []),
    (f"{FIRST}<|channel|>analysis<|message|>", f"hm<|end|>{FINAL}", "hm", "Hi", []),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content", "calls"), HARMONY_CASES)
def test_channels(special, start, text, reasoning, content, calls):
    answers = form("openai_gptoss", special)
    for pieces in forms(answers, text):
        assert read(answers, start, pieces) == (reasoning, content, calls)


def test_where_a_channel_starts(special):
    answers = form("openai_gptoss", special)
    final = f"{FIRST}<|channel|>final<|message|>"
    assert answers.start(f"x<|end|>{FIRST}", None) == FIRST
    assert answers.start(final, None) == final
    assert answers.start(f"{final}So", None) == final
    assert answers.start(f"{FIRST}<|channel|>analysis<|message|><|end|>", None) == ""
    assert answers.start("So far", "So far") == final


PARTS = (
    *("<think>", "</think>", "<|start|>assistant", "<|channel|>", "analysis", "final"),
    *(
        "commentary",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        " to=functions.find",
        "<|constrain|>json",
    ),
    *(CALL, "<tool_call>", '{"name": "find", "parameters": {"a": 1}}', TO_FIND, ANALYSIS),
    *("text", " ", "\n", "<", "<|", "</", '"', "{", "}", "é"),
)
STARTS = {
    "openai_gptoss": (FIRST, "", f"{FIRST}<|channel|>final<|message|>"),
    **dict.fromkeys(("qwen3", "deepseek_r1", "gemma4", None), ("inside", "undecided", "outside")),
}


@given(st.sampled_from(sorted(STARTS, key=str)), st.sampled_from(sorted(TOOL_FORMATS)), st.data())
def test_pieces_do_not_matter(plain, special, parser, fmt, data):
    tags_are_text = parser != "openai_gptoss" and data.draw(st.booleans())
    answers = form(parser, plain if tags_are_text else special, fmt)
    start = data.draw(st.sampled_from(STARTS[parser]))
    text = answers.tags.sign("".join(data.draw(st.lists(st.sampled_from(PARTS)))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    names = data.draw(st.sampled_from((NAMES, {})))
    assert read(answers, start, pieces, names) == read(answers, start, [text], names)


def test_parsers_that_do_not_fit(tagged, special):
    for parser, tools, tokenizer in (
        ("openai_gptoss", "auto", tagged),
        ("openai_gptoss", "hermes", special),
        ("unknown", "auto", special),
    ):
        with pytest.raises(InvalidConfigError, match=parser):
            choose_output_format(parser, TOOL_FORMATS["hermes"], tools, tokenizer, SpecialTokens())


def test_the_command_offers_all_parsers():
    from rjax.commands.serve.options import build_parser

    [option] = [a for a in build_parser()._actions if a.dest == "reasoning_parser"]
    assert tuple(option.choices or ()) == REASONING_PARSERS


def accepts(tokenizer: Tokenizer, constraint: Constraint, text: str) -> bool:
    """Whether the constraint allows exactly this text."""
    matcher = compile_grammar(constraint, llguidance_tokenizer(tokenizer))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool(name: str, key: str, strict: bool | None = True) -> Tool:
    parameters = {"type": "object", "properties": {key: {"type": "integer"}}, "required": [key]}
    function = {"name": name, "parameters": parameters, "strict": strict}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = [tool("find", "a"), tool("count", "b", None)]
CONTENTS = {
    "json": (Constraint("json", '{"type": "integer"}'), "17", "x"),
    "regex": (Constraint("regex", "[ab]+/"), "ab/", "c"),
    "grammar": (Constraint("grammar", '%ignore / +/\nstart: "a" x\nx: "b"+'), "a bb", "c"),
    "gbnf": (Constraint("grammar", 'root ::= "a" x\nx ::= "b"+'), "abb", "c"),
}


@pytest.mark.parametrize("kind", CONTENTS)
@pytest.mark.parametrize("name", ["plain", "tagged"])
def test_the_constraint_begins_after_the_reasoning(request, name, kind):
    tokenizer = request.getfixturevalue(name)
    constraint, good, bad = CONTENTS[kind]
    answers = form("qwen3", tokenizer)
    outer = functools.partial(answers.after_reasoning, constraint, calls=False)
    for start, lead in (("inside", "hm 17 {"), ("undecided", "<think>\nhm 17 {")):
        for text, expected in ((good, True), (bad, False), (f"{good}{bad}", False)):
            assert accepts(tokenizer, outer(start), f"{lead}\n</think>\n\n{text}") == expected
        assert not accepts(tokenizer, outer(start), lead)
    assert accepts(tokenizer, outer("undecided"), good)
    assert not accepts(tokenizer, outer("undecided"), bad)
    assert outer("outside") == constraint
    assert form(None, tokenizer).after_reasoning(constraint, "outside", calls=False) == constraint


@pytest.mark.parametrize("kind", CONTENTS)
def test_the_constraint_is_on_the_final_channel(special, kind):
    constraint, good, bad = CONTENTS[kind]
    answers = form("openai_gptoss", special)
    final = f"{FIRST}<|channel|>final<|message|>"
    for start, lead in (
        (FIRST, f"{ANALYSIS}{final}"),
        (FIRST, f"{ANALYSIS}{FIRST}{ANALYSIS}{final}"),
        (FIRST, final.removeprefix(FIRST)),
        ("", f"{FIRST}{ANALYSIS}{final}"),
        (f"{FIRST}<|channel|>analysis<|message|>", f"hm<|end|>{final}"),
        (final, ""),
    ):
        outer = answers.after_reasoning(constraint, start, calls=False)
        assert accepts(special, outer, lead + good), start
        assert not accepts(special, outer, lead + bad), start


@pytest.mark.sample(6, 16)
@pytest.mark.parametrize("fmt", TOOL_FORMATS)
@pytest.mark.parametrize("name", ["plain", "tagged"])
@pytest.mark.parametrize("parser", [None, "qwen3"])
def test_strict_functions_in_free_text(request, name, parser, fmt):
    tokenizer = request.getfixturevalue(name)
    answers = form(parser, tokenizer, fmt)
    one = TOOL_FORMATS[fmt].call_text("find", '{"a": 1}')
    free = TOOL_FORMATS[fmt].call_text("count", '{"any": ["thing"]}')
    both = TOOL_FORMATS[fmt].calls_text([("find", '{"a": 1}'), ("count", '{"any": ["thing"]}')])
    for start in ("outside",) if parser is None else ("outside", "undecided", "inside"):
        lead = {"inside": "hm <tool_call> {</think>\n\n"}.get(start, "")
        leads = [lead, "<think>hm <tool_call> {</think>\n\n"] if start == "undecided" else [lead]
        for several, before in itertools.product((True, False), leads):
            source = answers.text_or_calls_grammar(TOOLS, several=several, literal=False)
            allowed = answers.after_reasoning(Constraint("grammar", source), start, calls=True)
            check = functools.partial(accepts, tokenizer, allowed)
            for text in ("", "No call < here.", one, free):
                assert check(before + text), text
            assert check(before + both) == several
            for text in (one.replace("1", '"x"'), one.replace("find", "evil"), one[:-1] + "x"):
                assert not check(before + text), text
            if TOOL_FORMATS[fmt].anywhere:
                assert check(f"{before}So: {one}")
                assert check(f"{before}So: {one} and") == several
                assert not check(f"{before}So: {one.replace('1', 'x')}")


def test_calls_in_channels(special):
    answers = form("openai_gptoss", special)
    forced = Constraint("grammar", answers.calls_grammar(TOOLS, several=True, literal=False))
    free = Constraint("grammar", answers.text_or_calls_grammar(TOOLS, several=True, literal=False))
    forced, free = (answers.after_reasoning(c, FIRST, calls=True) for c in (forced, free))
    good, other = f'{TO_FIND}{{"a": 1}}', f'{TO_FIND.replace("find", "count")}{{"x": 1}}'
    final = FINAL.removeprefix(FIRST)
    told = f"<|channel|>commentary<|message|>I look.<|end|>{FIRST}"
    for lead in ("", f"{ANALYSIS}{FIRST}", f"{ANALYSIS}{FIRST}{ANALYSIS}{FIRST}"):
        assert accepts(special, forced, lead + good)
        assert accepts(special, free, lead + good)
        assert accepts(special, free, lead + other)
        assert not accepts(special, forced, lead + other)
        assert accepts(special, free, lead + told + good)
        assert accepts(special, free, lead + final)
        assert not accepts(special, forced, lead + final)
        for constraint in (forced, free):
            assert not accepts(special, constraint, f"{lead}{TO_FIND}{{}}")
