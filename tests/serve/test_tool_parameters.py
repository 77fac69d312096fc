"""Grammars of parameters that are written without JSON's quotes."""

import json
from typing import Any

import pytest

from rjax.errors import InvalidRequestError
from rjax.serve.parsing.tools.base import functions
from rjax.serve.parsing.tools.parser import join_call_deltas
from rjax.structured.lark import SpecialTokens
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .test_tool_families import Grammar
from .tool_formats import TOOL_FORMATS, make_tool

TREE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "t": {"type": "array", "items": {"$ref": "#"}}},
}
DATE = {"type": "string", "format": "date-time"}
SHORT = {"type": "string", "maxLength": 2}
# The schema of a parameter, values that it allows, and others.
CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string"}, ["", "5", "a\n", "<b>", "\n", "</arg_valu", "Zoë"], []),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", "", "a\n"]),
    ({"type": "string", "pattern": "b"}, ["b", "abc"], ["ac", ""]),
    ({"type": "string", "pattern": "^(a|b/)"}, ["ab", "b/c"], ["b", "ca"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["a", "abcd"]),
    ({"type": "string", "format": "secret"}, ["a"], []),
    ({"enum": ["a b", "", 1, None]}, ["a b", "", 1, None], ["a", 2]),
    ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
    ({"type": "integer", "minimum": 0, "maximum": 99}, [0, 99], [-1, 100, "x", 1.5]),
    ({"type": "number"}, [1.5, -2], ["x"]),
    ({"type": "boolean"}, [True, False], ["x", 1]),
    ({"type": ["string", "null"]}, ["a", None], []),
    ({"anyOf": [SHORT, {"type": "null"}]}, ["ab", None], ["abcde"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 5], []),
    ({"anyOf": [{"enum": ["a"]}, {"type": "array", "items": {"type": "integer"}}]}, ["a", [1]],
     ["b", ["a"]]),
    ({"type": "array", "items": DATE}, [["2026-01-02T03:04:05Z"]], [["today"], "x"]),
    ({"$ref": "#/$defs/Short"}, ["ab"], ["abc"]),
    ({"allOf": [{"$ref": "#/$defs/Short"}], "description": "short"}, ["ab"], ["abc"]),
    ({"type": "array", "items": {"$ref": "#/$defs/Short"}}, [["ab"]], [["abc"]]),
    ({"$ref": "#/properties/other"}, [7], ["x"]),
    ({}, ["a", {"a": [1]}], []),
    ({"minimum": 3}, [5], [2]),
]  # fmt: skip

# Not in JSON's quotes, nor of a type that a rule could follow from.
NOT_IN_GEMMA4: list[dict[str, Any]] = [{"type": "array", "items": DATE}, {"minimum": 3}]


def tool(schema: Any, **more: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": {"value": schema, "other": {"type": "integer"}},
        "required": ["value"],
        "$defs": {"Short": SHORT},
        **more,
    }
    return make_tool("f", parameters, True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER)


@pytest.mark.parametrize(
    ("schema", "good", "bad", "name"),
    [
        (*case, name)
        for case in CASES
        for name in ("qwen3_coder", "glm45", "glm47", "pythonic", "gemma4")
        if name != "gemma4" or case[0] not in NOT_IN_GEMMA4
    ],
)
def test_values_match_their_schema(tokenizer, name, schema, good, bad):
    fmt = TOOL_FORMATS[name]
    grammar = Grammar(tokenizer, fmt.grammar([tool(schema)], SpecialTokens(), several=False))
    for value in good:
        text = fmt.call_text("f", json.dumps({"value": value}))
        assert grammar.accepts(text), text
        made = fmt.parser(functions([tool(schema)]), str)
        (call,) = join_call_deltas(made.feed(text, ended=True)[1])
        assert json.loads(call.arguments) == {"value": value}
    for value in bad:
        text = fmt.call_text("f", json.dumps({"value": value}))
        assert not grammar.accepts(text), text
    assert not grammar.accepts(fmt.call_text("f", "{}"))
    assert not grammar.accepts(fmt.call_text("f", '{"other": 1}'))
    value = good[0]
    assert grammar.accepts(fmt.call_text("f", json.dumps({"value": value, "other": 1})))
    assert not grammar.accepts(fmt.call_text("f", json.dumps({"value": value, "more": 1})))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_a_string_ends_at_the_first_tag(tokenizer, name):
    fmt: Any = TOOL_FORMATS[name]
    source = fmt.grammar([tool({"type": "string"})], SpecialTokens(), several=False)
    grammar = Grammar(tokenizer, source)
    for text in (f"a{fmt.value_end}", f"a{fmt.value_end}b", f"{fmt.value_end}\n"):
        assert not grammar.accepts(fmt.call_text("f", json.dumps({"value": text}))), text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "gemma4"])
def test_further_parameters(tokenizer, name):
    fmt = TOOL_FORMATS[name]
    for others, good, bad in (
        (True, {"value": 1, "more": "x"}, {"value": "x"}),
        ({"type": "integer"}, {"value": 1, "more": 2, "again": 3}, {"value": 1, "more": "x"}),
        (True, {"value": 1, "other": 2, "more": [1]}, {"value": 1, "more": 1, "other": "x"}),
    ):
        made = tool({"type": "integer"}, additionalProperties=others)
        grammar = Grammar(tokenizer, fmt.grammar([made], SpecialTokens(), several=False))
        assert grammar.accepts(fmt.call_text("f", json.dumps(good))), good
        assert not grammar.accepts(fmt.call_text("f", json.dumps(bad))), bad
    made = tool({"type": "integer"}, required=["value", "unnamed"], additionalProperties=True)
    grammar = Grammar(tokenizer, fmt.grammar([made], SpecialTokens(), several=False))
    assert grammar.accepts(fmt.call_text("f", '{"value": 1, "unnamed": "x"}'))
    assert not grammar.accepts(fmt.call_text("f", '{"value": 1}'))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (DATE, "'format' of a string"),
    ({"type": "string", "not": {"const": "a"}}, "'not' of a string"),
    ({"type": "string", "pattern": "^a|b$"}, "the pattern"),
    ({"anyOf": [SHORT, {"type": "integer"}]}, "a choice between a string"),
    ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, "a choice between"),
    ({"const": "a</arg_value>"}, "the value"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_schemas_that_no_grammar_expresses_are_refused(schema, said):
    fmt = TOOL_FORMATS["glm45"]
    with pytest.raises(InvalidRequestError, match=said):
        fmt.grammar([tool(schema)], SpecialTokens(), several=False)
    # Without a constraint the schema only types the values.
    free = make_tool("f", tool(schema).function.parameters)
    fmt.text_or_calls_grammar([free], SpecialTokens(), several=False)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (DATE, "'format' of a string"),
        (NOT_IN_GEMMA4[0], "'format' of a string"),
        (NOT_IN_GEMMA4[1], "minimum without a type"),
        ({"type": "array", "minItems": 2}, "'minItems' of a list"),
        ({"type": "object", "maxProperties": 2}, "'maxProperties' of an object"),
        ({"enum": ['<|"|>']}, "the value"),
        ({"enum": []}, "without a possible value"),
    ],
)
def test_schemas_that_the_grammar_of_gemma_4_does_not_express(schema, said):
    with pytest.raises(InvalidRequestError, match=said):
        TOOL_FORMATS["gemma4"].grammar([tool(schema)], SpecialTokens(), several=False)


def test_nested_values_of_gemma_4(tokenizer):
    """Objects in lists, with sorted keys."""
    item = {
        "type": "object",
        "properties": {"b": SHORT, "A": {"type": ["integer", "null"]}},
        "additionalProperties": True,
    }
    made = tool({"type": "array", "items": {"anyOf": [item, {"type": "boolean"}]}})
    fmt = TOOL_FORMATS["gemma4"]
    grammar = Grammar(tokenizer, fmt.grammar([made], SpecialTokens(), several=False))
    for value, good in (
        ([], True),
        ([{}, {"A": 1, "b": "x{"}, True, {"b": "}", "c": [{"d": None}]}], True),
        ([{"A": None}], True),
        ([{"b": "xyz"}], False),
        ([{"A": "x"}], False),
        ([1], False),
    ):
        text = fmt.call_text("f", json.dumps({"value": value}))
        assert grammar.accepts(text) == good, text
        parser = fmt.parser(functions([made]), str)
        (call,) = join_call_deltas(parser.feed(text, ended=True)[1])
        assert json.loads(call.arguments) == {"value": value}
    assert not grammar.accepts("<|tool_call>call:f{value:[{b:x}]}<tool_call|>")


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "pythonic", "gemma4"])
def test_parameters_that_no_grammar_expresses_are_refused(name):
    for made in (
        tool(False),
        tool({}, anyOf=[{"required": ["other"]}]),
        tool({}, minProperties=2),
        tool({}, required=["a<b"], additionalProperties=True),
    ):
        with pytest.raises(InvalidRequestError, match=rf"schema of f .*\({name}\) cannot enforce"):
            TOOL_FORMATS[name].grammar([made], SpecialTokens(), several=False)


def test_a_schema_that_refers_to_itself(tokenizer):
    for name in ("qwen3_coder", "glm45", "pythonic", "gemma4"):
        fmt = TOOL_FORMATS[name]
        source = fmt.grammar([make_tool("f", TREE)], SpecialTokens(), several=False)
        grammar = Grammar(tokenizer, source)
        assert grammar.accepts(fmt.call_text("f", '{"v": 1, "t": [{"v": 2, "t": [{"v": 3}]}]}'))
        assert not grammar.accepts(fmt.call_text("f", '{"v": 1, "t": [{"v": "x"}]}'))
