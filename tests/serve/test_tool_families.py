"""Calls as the chat template of each family writes them: read, and allowed by the grammars."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rjax.serve
from rjax.serve.parsing.registry import choose_output_format
from rjax.serve.parsing.tools.base import functions
from rjax.serve.parsing.tools.parser import join_call_deltas
from rjax.serve.parsing.tools.registry import FAMILIES, choose_tool_format
from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar, grammar_special_tokens, grammar_tokenizer
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .reasoning_model import write_reasoning_model
from .tool_formats import JSON_FORMATS, TEMPLATES, TOOL_FORMATS, make_tool, rendered, template

ITEM = {"type": "object", "properties": {"b": {"type": "array", "items": {"type": "integer"}}}}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "item": {"$ref": "#/$defs/Item"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "kind": {"enum": ["red", "blue"]},
    },
    "$defs": {"Item": ITEM},
}
TOOLS = [make_tool("find", PARAMETERS), make_tool("now", None)]
EVERYTHING: dict[str, Any] = {
    "text": 'Zoë said: "it\'s <b>5</b>",\n\n{2} \\ 🙂 [x](y)',
    "count": -3,
    "share": 0.25,
    "flag": True,
    "list": ["a, b", "}]", "None", "x=1)"],
    "item": {"b": [1, 2]},
    "maybe": None,
    "kind": "blue",
}
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("now", {})],
    [("find", {})],
    [("find", EVERYTHING)],
    [("find", {"text": "5"}), ("now", {}), ("find", {"text": " null\n", "maybe": 7})],
    [("find", {"text": "", "count": 0}), ("find", {"flag": False, "list": [], "item": {}})],
]
ANYWHERE = [name for name, fmt in TOOL_FORMATS.items() if fmt.anywhere]


def read(fmt: str, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    parser = TOOL_FORMATS[fmt].parser(functions(TOOLS), str)
    content, deltas = "", []
    for i, piece in enumerate(pieces):
        text, found = parser.feed(piece, ended=i == len(pieces) - 1)
        content, deltas = content + text, deltas + found
    calls = join_call_deltas(deltas)
    assert parser.num_calls == len(calls)
    return content, [(call.name, call.arguments) for call in calls]


def read_all(fmt: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The parts of a text, which do not depend on where it is split."""
    found = read(fmt, [text])
    assert read(fmt, [*text, ""]) == found
    for at in range(len(text)):
        assert read(fmt, [text[:at], text[at:]]) == found, text[:at]
    content, calls = found
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def test_every_format_has_a_template():
    names = {name for family in FAMILIES.values() for name in family}
    assert {path.stem for path in TEMPLATES.iterdir()} == names | {"unknown"}


def test_every_name_is_documented():
    page = (Path(rjax.serve.__file__).parent / "README.md").read_text()
    assert [name for name in TOOL_FORMATS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_markers_choose_the_format(name):
    tokenizer = Tokenizer(TOKENIZER, chat_template=template(name))
    assert choose_tool_format("auto", tokenizer) is TOOL_FORMATS[name]
    assert [other for other, fmt in TOOL_FORMATS.items() if fmt.fits(template(name))] == [name]
    for other, fmt in TOOL_FORMATS.items():
        if (other, name) not in (("mistral", "mistral_v13"), ("pythonic", "llama4_pythonic")):
            assert choose_tool_format(other, tokenizer) is fmt


def test_templates_without_markers():
    plain, unknown = Tokenizer(TOKENIZER), Tokenizer(TOKENIZER, chat_template=template("unknown"))
    assert choose_tool_format("auto", plain) is TOOL_FORMATS["hermes"]
    assert choose_tool_format("auto", unknown) is None
    assert choose_tool_format("glm45", unknown) is TOOL_FORMATS["glm45"]
    # The name of a family selects the variant that the template has.
    for name, variant in (("mistral", "mistral_v13"), ("pythonic", "llama4_pythonic")):
        tokenizer = Tokenizer(TOKENIZER, chat_template=template(variant))
        assert choose_tool_format(name, tokenizer) is TOOL_FORMATS[variant]


@pytest.mark.sample(13, 13)
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_rendered_calls_are_read(name, calls):
    text = rendered(name, calls)
    assert read_all(name, text) == ("", calls)
    if name != "mistral":  # its template adds the id
        told = [(function, json.dumps(given, ensure_ascii=False)) for function, given in calls]
        assert TOOL_FORMATS[name].calls_text(told) == text


@pytest.mark.parametrize("name", ANYWHERE)
def test_text_around_calls_is_content(name):
    calls = CALLS[3]
    text = rendered(name, calls, "Let me <see>.")
    assert read_all(name, text)[0].rstrip("\n") == "Let me <see>."
    assert read_all(name, text)[1] == calls
    content, found = read_all(name, f"{text}\nSo: {rendered(name, CALLS[0])}")
    assert content.replace("\n", "") == "Let me <see>.So: "
    assert found == [*calls, ("now", {})]


VALUES = {
    "text": st.text(st.characters(exclude_categories=("Cs",))),
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "list": st.lists(st.text(st.characters(exclude_categories=("Cs",)))),
    "item": st.fixed_dictionaries({"b": st.lists(st.integers())}),
    "maybe": st.none() | st.integers(),
    "kind": st.sampled_from(("red", "blue")),
}


@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3),
    st.data(),
)
def test_what_is_rendered_is_read(name, arguments, data):
    calls = [("find", given) for given in arguments]
    text = rendered(name, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    content, found = read(name, pieces)
    assert (content, [(function, json.loads(given)) for function, given in found]) == ("", calls)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_unknown_functions_stay_content(name):
    text = rendered(name, [("evil", {"text": "a"})])
    assert read_all(name, text) == (text, [])
    content, calls = read_all(name, rendered(name, [*CALLS[0], ("evil", {"text": "a"})]))
    assert "evil" in content and calls == CALLS[0]


@pytest.mark.parametrize("name", JSON_FORMATS)
def test_malformed_calls_stay_content(name):
    text = rendered(name, [("find", {"text": "a"})])
    for bad in (
        text.replace('{"text": "a"}', '["a"]'),
        text.replace('{"text": "a"}', '"a"'),
        text.replace("find", "fi nd"),
        text[: text.index("find") + 2],
        TOOL_FORMATS[name].opening[0] if TOOL_FORMATS[name].opening else "{",
    ):
        assert read_all(name, bad) == (bad, []), bad


# Text, and the content and calls that are read.
PARAMETER_CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("qwen3_coder", "<tool_call>find</tool_call>", "<tool_call>find</tool_call>", []),
    ("qwen3_coder", "<tool_call>\n<function=now", "<tool_call>\n<function=now", []),
    ("qwen3_coder", "<tool_call><function=now></function> x", "x", [("now", {})]),
    (
        "qwen3_coder",
        "<tool_call><function=find>hm <parameter=text>a\n\n</parameter><parameter=count> 5 "
        "</parameter></function></tool_call>",
        "",
        [("find", {"text": "a\n", "count": 5})],
    ),
    ("glm45", "<tool_call>now</tool_call>", "", [("now", {})]),
    ("glm45", "<tool_call>now or</tool_call>", "<tool_call>now or</tool_call>", []),
    (
        "glm45",
        "<tool_call>find <arg_key> text </arg_key><arg_value> a</arg_value></tool_call>!",
        "!",
        [("find", {"text": " a"})],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), PARAMETER_CASES)
def test_parameters_that_are_written_otherwise(name, text, content, calls):
    assert read_all(name, text) == (content, calls)


# A parameter, its value as the model wrote it, and as it is read.
TYPED: list[tuple[str, str, Any]] = [
    ("text", "5", "5"),
    ("text", '"a"', '"a"'),
    ("text", "null", "null"),
    ("count", "5", 5),
    ("count", "five", "five"),
    ("share", "1e3", 1000.0),
    ("flag", "True", True),
    ("flag", "false", False),
    ("flag", "yes", "yes"),
    ("list", '["a", 1]', ["a", 1]),
    ("list", "['a', None]", ["a", None]),
    ("list", "[", "["),
    ("item", '{"b": [1', '{"b": [1'),
    ("item", '{"x": "a\nb"}', {"x": "a\nb"}),
    ("item", "{'x': 'it\\'s \"\\x41\"'}", {"x": 'it\'s "A"'}),
    ("list", "['\\\\', \"'\"]", ["\\", "'"]),
    ("list", "['\\']", "['\\']"),
    ("list", "'\\'" * 9, "'\\'" * 9),
    ("maybe", "null", None),
    ("maybe", "NaN", "NaN"),
    ("kind", "red", "red"),
    ("unknown", "red", "red"),
    ("unknown", '{"a": 1}', {"a": 1}),
    ("unknown", "true", True),
]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "glm47"])
@pytest.mark.parametrize(("key", "value", "expected"), TYPED)
def test_values_are_typed_by_the_schema(name, key, value, expected):
    text = rendered(name, [("find", {key: value})])
    assert read_all(name, text) == ("", [("find", {key: expected})])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_long_strings_are_streamed(name):
    parser = TOOL_FORMATS[name].parser(functions(TOOLS), str)
    text = rendered(name, [("find", {"text": "word " * 50})])
    deltas = [delta for char in text for delta in parser.feed(char)[1]]
    assert deltas[0].name == "find" and deltas[0].arguments == ""
    assert sum(delta.arguments in "word " for delta in deltas) > 200
    # A call that is cut off is as long as it came.
    assert read(name, [text[: text.index("word") + 7]])[1] == [("find", '{"text": "word wo')]


PYTHONIC_CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (
        "[find(text='it\\'s \"a\"', list=['x', None])]",
        "",
        [("find", {"text": 'it\'s "a"', "list": ["x", None]})],
    ),
    ('[find(text="\\x41\\u00e9\\n")]', "", [("find", {"text": "Aé\n"})]),
    (" [ now ( ) , ]", "", [("now", {})]),
    ("[now()] and more", "and more", [("now", {})]),
    ("<|python_tag|>[now()]", "", [("now", {})]),
    ("[link](http://x)", "[link](http://x)", []),
    ("[now(", "[now(", []),
    ("[find(text=open('x'))]", "[find(text=open('x'))]", []),
    ("[find('x')]", "[find('x')]", []),
    ("[now(), 5]", ", 5]", [("now", {})]),
    ("I call [now()]", "I call [now()]", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), PYTHONIC_CASES)
def test_python_calls(text, content, calls):
    assert read_all("pythonic", text) == (content, calls)


GEMMA4_CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("<|tool_call>call:now{}", "", [("now", {})]),
    (" <|tool_call> call: now { } <tool_call|> ", " ", [("now", {})]),
    (
        '<|tool_call>call:find{text: <|"|>a:{"b", \\\n<|"|> , count : 5 , item:{<|"|>b<|"|>:[1]}}',
        "",
        [("find", {"text": 'a:{"b", \\\n', "count": 5, "item": {"b": [1]}})],
    ),
    (
        "<|tool_call>call:find{text:plain words,flag:True,maybe:None,share:1e3}<tool_call|>!",
        "!",
        [("find", {"text": "plain words", "flag": True, "maybe": None, "share": 1000.0})],
    ),
    ("<|tool_call>call:find{text", "<|tool_call>call:find{text", []),
    ("<|tool_call>call:find{text}", "<|tool_call>call:find{text}", []),
    ("<|tool_call>call:find{a:1]", "<|tool_call>call:find{a:1]", []),
    ("<|tool_call>call:find{a:1:2}", "<|tool_call>call:find{a:1:2}", []),
    ('<|tool_call>call:find{a:<|"|>}', '<|tool_call>call:find{a:<|"|>}', []),
    ("<|tool_call>find{}", "<|tool_call>find{}", []),
    ("<|tool_call>call:fi nd{}", "<|tool_call>call:fi nd{}", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), GEMMA4_CASES)
def test_calls_with_bare_keys(text, content, calls):
    assert read_all("gemma4", text) == (content, calls)


def test_python_tags_of_llama_4():
    text = f"<|python_start|>{rendered('llama4_pythonic', CALLS[0])}<|python_end|>"
    assert read_all("llama4_pythonic", text) == ("", CALLS[0])


@pytest.fixture(scope="module", params=[False, True])
def tokenizer_of(request, tmp_path_factory):
    """Tokenizers by format: the tags are text, or special tokens."""
    made: dict[str, Tokenizer] = {}

    def of(name: str) -> Tokenizer:
        key = name if request.param else ""
        if key not in made:
            folder = tmp_path_factory.mktemp("tags")
            tags = TOOL_FORMATS[name].tags
            write = request.param and write_reasoning_model(folder, special=True, tags=tags)
            made[key] = Tokenizer(write or TOKENIZER)
        return made[key]

    return of


@functools.cache
def llguidance_tokenizer(tokenizer: Tokenizer) -> Any:
    return grammar_tokenizer(tokenizer, tokenizer.vocab_size, sorted(tokenizer.eos_token_ids))


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    seen = llguidance_tokenizer(tokenizer)
    return grammar_special_tokens(tokenizer, seen, tokenizer.vocab_size)


class Grammar:
    """A compiled grammar."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        made = Constraint("grammar", source)
        self._matcher = compile_grammar(made, llguidance_tokenizer(tokenizer))

    def accepts(self, text: str) -> bool:
        """Whether the grammar allows exactly this text."""
        self._matcher.reset()
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        taken = self._matcher.try_consume_tokens(tokens)
        return taken == len(tokens) and self._matcher.is_accepting()


STRICT = [make_tool("find", PARAMETERS, True), make_tool("now", None, True)]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("now", {"text": "a"}),
    ("find", {"count": "five"}),
    ("find", {"count": 1.5}),
    ("find", {"flag": "maybe"}),
    ("find", {"list": [1]}),
    ("find", {"item": {"b": ["x"]}}),
    ("find", {"item": {"c": 1}}),
    ("find", {"maybe": "x"}),
    ("find", {"kind": "green"}),
    ("find", {"more": 1}),
    ("evil", {}),
]


@pytest.mark.sample(3, 3)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_grammars_allow_what_the_template_writes(name, tokenizer_of):
    fmt, tokenizer = TOOL_FORMATS[name], tokenizer_of(name)
    special = special_tokens(tokenizer)
    for several in (True, False):
        forced = Grammar(tokenizer, fmt.grammar(TOOLS, special, several=several))
        free, loose = (
            Grammar(tokenizer, fmt.text_or_calls_grammar(tools, special, several=several))
            for tools in (STRICT, TOOLS)
        )
        for calls in CALLS:
            text = rendered(name, calls)
            for grammar in (forced, free, loose):
                assert grammar.accepts(text) == (several or len(calls) == 1), text
        for call in WRONG:
            text = rendered(name, [call])
            assert not forced.accepts(text) and not free.accepts(text), text
            assert loose.accepts(text) == (call[0] != "evil"), text
        assert free.accepts("No call.") and not forced.accepts("No call.")
        if fmt.anywhere:
            text = rendered(name, CALLS[2], "Let me see.")
            assert free.accepts(text)
            assert free.accepts(f"{text} So") == several
            assert not free.accepts(rendered(name, [WRONG[1]], "Let me see."))


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_calls_after_the_reasoning(name, parser, tokenizer_of):
    tokenizer = tokenizer_of(name)
    special = special_tokens(tokenizer)
    answers = choose_output_format(parser, TOOL_FORMATS[name], name, tokenizer, special)
    signed = answers.tags.sign(f"<think>hm</think>\n\n{rendered(name, CALLS[2])}")
    for pieces in ([signed], list(signed)):
        made = answers.parser("undecided", functions(TOOLS))
        deltas = [made.feed(piece) for piece in pieces] + [made.feed("", ended=True)]
        assert "".join(delta.reasoning for delta in deltas) == "hm"
        assert not "".join(delta.content for delta in deltas)
        (call,) = join_call_deltas(piece for delta in deltas for piece in delta.calls)
        assert (call.name, json.loads(answers.tags.unsign(call.arguments))) == CALLS[2][0]
