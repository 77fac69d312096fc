"""Tool schemas and response schemas as people write them: definitions, pydantic, open objects."""

import datetime
import decimal
import enum
import functools
import json
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AnyUrl, BaseModel, Field, TypeAdapter

from rjax.serve.api.structured_outputs import json_constraint
from rjax.serve.config.limits import ServeLimits
from rjax.serve.protocol.requests import Tool
from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar, grammar_tokenizer
from rjax.structured.lark import SpecialTokens
from rjax.structured.schemas import generation_schema
from rjax.tokenization import Tokenizer

from .live_server import TOKENIZER
from .tool_formats import TOOL_FORMATS


@functools.cache
def tokenizers() -> tuple[Tokenizer, Any]:
    found = Tokenizer(TOKENIZER)
    return found, grammar_tokenizer(found, found.vocab_size, sorted(found.eos_token_ids))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the constraint allows exactly this text."""
    tokenizer, llt = tokenizers()
    matcher = compile_grammar(constraint, llt)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def tool(name: str, parameters: dict[str, Any] | None) -> Tool:
    function = {"name": name, "parameters": parameters}
    return Tool.model_validate({"type": "function", "function": function})


def calls(fmt: str, *texts: tuple[str, object]) -> str:
    return TOOL_FORMATS[fmt].calls_text([(name, json.dumps(args)) for name, args in texts])


class Item(BaseModel):
    label: str


class Basket(BaseModel):
    items: list[Item]
    spare: Item | None = None


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


OTHER_ITEM = {
    "type": "object",
    "properties": {"it": {"$ref": "#/definitions/Item"}},
    "required": ["it"],
    "definitions": {"Item": {"type": "integer", "minimum": 0, "maximum": 99}},
}
WHOLE = {  # a reference to the whole schema, and one to a property
    "type": "object",
    "properties": {"in": {"$ref": "#"}, "a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}},
}


@pytest.mark.parametrize("fmt", TOOL_FORMATS)
def test_definitions_of_several_tools(fmt):
    tools = [
        tool("basket", Basket.model_json_schema()),
        tool("number", OTHER_ITEM),  # another Item
        tool("tree", Tree.model_json_schema()),
        tool("whole", WHOLE),
    ]
    grammar = Constraint("grammar", TOOL_FORMATS[fmt].grammar(tools, SpecialTokens(), several=True))
    good = [
        ("basket", {"items": [{"label": "x"}], "spare": {"label": "y"}}),
        ("number", {"it": 7}),
        ("tree", {"value": 1, "children": [{"value": 2, "children": [{"value": 3}]}]}),
        ("whole", {"in": {"in": {"a": True}, "b": False}}),
    ]
    for call in good:
        assert accepts(grammar, calls(fmt, call)), call
    assert accepts(grammar, calls(fmt, *good))
    for call in (
        ("basket", {"items": [7]}),
        ("number", {"it": {"label": "x"}}),
        ("tree", {"value": 1, "children": [{"children": []}]}),
        ("tree", {"it": 7}),
        ("whole", {"in": {"in": 1}}),
    ):
        assert not accepts(grammar, calls(fmt, call)), call


def test_no_parameters_are_no_arguments():
    grammar = TOOL_FORMATS["hermes"].grammar([tool("now", None)], SpecialTokens(), several=False)
    assert accepts(Constraint("grammar", grammar), calls("hermes", ("now", {})))
    assert not accepts(Constraint("grammar", grammar), calls("hermes", ("now", {"a": 1})))


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Everything(BaseModel):
    """All at once."""

    color: Color
    when: datetime.datetime
    span: datetime.timedelta
    key: uuid.UUID
    price: decimal.Decimal
    pair: tuple[int, str]
    table: dict[str, int]
    labels: Annotated[list[str], Field(min_length=1, max_length=2)]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    either: int | str | None = None
    word: Annotated[str, Field(pattern="^[a-c]+$", max_length=4, examples=["ab"])] = "a"
    file: Path = Path("x")
    data: bytes = b""
    link: AnyUrl | None = None
    inner: Annotated[Tree, Field(description="a tree", deprecated=True)]
    anything: Any = None


EVERYTHING = {
    "color": "red",
    "when": "2026-01-02T03:04:05Z",
    "span": "P1D",
    "key": "12345678-1234-5678-1234-567812345678",
    "price": "1.5",
    "pair": [1, "a"],
    "table": {"x": 1},
    "labels": ["a"],
    "pet": {"kind": "dog", "name": "Rex"},
    "either": None,
    "word": "abc",
    "file": "a/b",
    "data": "x",
    "link": "https://example.org/a",
    "inner": {"value": 1, "children": [{"value": 2}]},
    "anything": {"free": [1]},
}


def test_what_pydantic_writes():
    schema = TypeAdapter(Everything).json_schema()
    Everything.model_validate_json(json.dumps(EVERYTHING))
    constraint = json_constraint(schema, ServeLimits(), "schema")
    assert accepts(constraint, json.dumps(EVERYTHING))
    for name, value in (
        ("color", "green"),
        ("pet", {"kind": "dog", "lives": 9}),
        ("word", "abcd1"),
        ("labels", []),
        ("inner", {"value": 1, "children": [{}]}),
        ("pet", {"kind": "dog", "name": "Rex", "more": 1}),
    ):
        assert not accepts(constraint, json.dumps(EVERYTHING | {name: value})), name


AB: dict[str, Any] = {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NESTED = {"type": "object", "properties": {"list": {"type": "array", "items": AB}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (AB, {"a": 1, "more": 1}),
        (NESTED, {"list": [{"a": 1, "more": 1}]}),
        (NESTED, {"list": [], "more": 1}),
        ({"anyOf": [AB, {"type": "null"}]}, {"more": 1}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": AB}}, {"more": 1}),
        ({"$ref": "#/$defs/A", "description": "an A", "$defs": {"A": AB}}, {"more": 1}),
        ({"additionalProperties": AB}, {"x": {"more": 1}}),
        ({"type": "object", "properties": {}}, {"more": 1}),
    ],
)
def test_objects_are_closed_unless_the_reading_is_literal(schema, value):
    kept = json.dumps(schema)
    text = json.dumps(value)
    schema = {"type": "object", **schema}
    assert not accepts(json_constraint(schema, ServeLimits(), "schema"), text)
    assert accepts(json_constraint(schema, ServeLimits(), "schema", literal=True), text)
    schema.pop("type")
    assert kept in (json.dumps(schema), json.dumps({"type": "object"} | schema))  # not written to


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (AB | {"additionalProperties": True}, {"a": 1, "more": 1}),
        (AB | {"additionalProperties": {"type": "null"}}, {"a": 1, "more": None}),
        ({}, {"more": 1}),
        # Each part allows the names of the others only while it stays open.
        ({"allOf": [AB, {"properties": {"c": {}}, "required": ["c"]}]}, {"a": 1, "c": 1}),
        (
            {
                "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"c": {}}}],
                "$defs": {"A": AB, "B": {"$ref": "#/$defs/A"}},
            },
            {"a": 1, "c": 1},
        ),
        (
            {"$ref": "#/$defs/A", "properties": {"c": {}}, "$defs": {"A": AB}},
            {"a": 1, "c": 1},
        ),
        (
            AB | {"anyOf": [{"properties": {"c": {"type": "null"}}, "required": ["c"]}]},
            {"a": 1, "c": None},
        ),
        # Inside parts that are joined, too.
        (
            {
                "allOf": [
                    {"properties": {"x": AB}},
                    {"properties": {"x": {"properties": {"c": {}}}}},
                ]
            },
            {"x": {"a": 1, "c": 1}},
        ),
        (AB | {"required": ["z"]}, {"z": 1}),
        # A property of the name of a keyword, and data that looks like a schema.
        (
            {"properties": {"properties": {"type": "object"}}},
            {"properties": {"more": 1}},
        ),
        ({"properties": {"x": {"const": {"properties": {}}}}}, {"x": {"properties": {}}}),
    ],
)
def test_what_closing_must_not_forbid(schema, value):
    schema = {"type": "object", **schema}
    for literal in (False, True):
        constraint = json_constraint(schema, ServeLimits(), "schema", literal=literal)
        assert accepts(constraint, json.dumps(value)), literal


def test_negated_and_unknown_references_stay_as_written():
    negated = {"not": {"$ref": "#/$defs/A"}, "$defs": {"A": AB}}
    assert generation_schema(negated) == negated
    anchored = {"allOf": [{"$ref": "#anchor"}], "$defs": {"A": AB | {"$anchor": "anchor"}}}
    assert generation_schema(anchored) == anchored
    looped = {"allOf": [{"$ref": "#"}, AB]}
    assert generation_schema(looped) == looped
    for pointer in ("#/no/such", "#/$defs/0", "#/%24defs/A", 7):
        schema = {"$ref": pointer, "$defs": {"A": AB}}
        assert generation_schema(schema)["$ref"] == pointer


def test_formats_that_no_grammar_knows_are_notes():
    schema = {"properties": {"format": {"type": "string", "format": "secret"}}}
    found = generation_schema(schema, literal=True)
    assert found == {"properties": {"format": {"type": "string"}}}
    kept = {"type": "string", "format": "uuid"}
    assert generation_schema(kept) == kept
