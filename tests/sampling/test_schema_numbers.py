"""Numbers of JSON schemas beyond 2**53: exact, or refused in one line."""

import json
from typing import Any

import llguidance
import pytest

from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar

BIG = 1234567890123456789  # float64 makes it end in 768
BYTES = llguidance.LLTokenizer("byte")


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = compile_grammar(Constraint("json", json.dumps(schema)), BYTES)
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [BIG]},
        {"enum": ["a", -BIG]},
        {"enum": [2**53 + 1]},
        {"enum": [2**63]},
        {"enum": [2**64 - 1]},
        {"enum": [10**400]},
        {"const": BIG},
        {"const": {"a": [{"b": BIG}]}},
        {"type": "integer", "minimum": BIG, "maximum": BIG},
        {"type": "integer", "minimum": BIG},
        {"type": "integer", "maximum": BIG},
        {"type": "integer", "maximum": 2**63 - 2},
        {"type": "integer", "minimum": -(2**63)},
        {"type": "integer", "exclusiveMaximum": 2**62},
        {"type": "integer", "exclusiveMaximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": 2**53},
        {"type": "number", "maximum": 2**60},
        {"type": "number", "maximum": 1e30},
        {"maximum": 2**60},
        {"type": "integer", "multipleOf": 2**53 + 1},
        {"type": "object", "properties": {"enum": {"items": {"anyOf": [{"const": BIG}]}}}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_what_would_be_rounded_is_refused(schema):
    for kind, source in (
        ("json", json.dumps(schema)),
        ("grammar", 'start: "x" %json ' + json.dumps(schema)),
    ):
        with pytest.raises(ValueError, match="would be rounded; give integers of up to") as error:
            compile_grammar(Constraint(kind, source), BYTES)
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"enum": [2**53]}, 2**53, 2**53 - 1),
        ({"enum": [2**60, 10**18, -(2**62)]}, -(2**62), 1),
        ({"const": 10**18}, 10**18, 10**18 + 1),
        ({"type": "integer", "minimum": 0, "maximum": 2**62}, 2**62, 2**62 + 1),
        ({"type": "integer", "minimum": -(2**62)}, -(2**62), -(2**62) - 1),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, 2**63 - 1, 2**63),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, 2**63 - 1, 2**64),
        ({"type": "integer", "exclusiveMaximum": 2**63}, 2**63 - 1, 2**63),
        ({"type": "integer", "exclusiveMinimum": 2**53 - 1}, 2**53, 2**53 - 1),
        ({"type": "number", "maximum": 10**18}, 10**18, 10**18 + 1),
        ({"type": "number", "maximum": 2**53 - 1}, 2**53 - 1, 2**53),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_accepted_is_exact(schema, yes, no):
    assert accepts(schema, str(yes))
    assert not accepts(schema, str(no))


def test_notes_and_names_are_no_numbers_of_the_schema():
    schema = {
        "type": "object",
        "properties": {"maximum": {"type": "integer", "default": BIG, "examples": [BIG]}},
        "additionalProperties": False,
    }
    assert accepts(schema, '{"maximum": 5}')
