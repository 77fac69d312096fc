"""Closed objects whose patterns match no further name: no sample ends after a comma."""

import json
import random
from typing import Any

import llguidance
import llguidance.numpy
import pytest

from rjax.structured.constraint import Constraint
from rjax.structured.grammar import compile_grammar

BYTES = llguidance.LLTokenizer("byte")
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SCHEMAS = {
    "one name": {"properties": {"a": DIGIT, "b": DIGIT}, "patternProperties": {"^a$": {}}},
    "class": {"properties": {"a": DIGIT, "b": DIGIT}, "patternProperties": {"^[ab]$": DIGIT}},
    "optional": {"properties": {"a": {}, "ab": {}}, "patternProperties": {"^ab?$": DIGIT}},
    "required": {"patternProperties": {"^b$": DIGIT}, "required": ["b"]},
    "two": {
        "properties": {"a": True, "b": DIGIT},
        "patternProperties": {"^a$": DIGIT, "^b$": DIGIT},
    },
    "others": {"properties": {"a": DIGIT}, "patternProperties": {"^[ab]$": DIGIT}},
    "quote": {"properties": {'"': DIGIT, "b": DIGIT}, "patternProperties": {'^"$': DIGIT}},
    "nested": {"properties": {"x": {
        **CLOSED, "properties": {"a": DIGIT, "b": DIGIT}, "patternProperties": {"^b$": DIGIT},
    }}},
}  # fmt: skip


def walks(constraint: Constraint, count: int = 60) -> list[str]:
    """Texts of random walks over the allowed bytes."""
    first = compile_grammar(constraint, BYTES)
    bitmask = llguidance.numpy.allocate_token_bitmask(1, BYTES.vocab_size)
    found = []
    for seed in range(count):
        draw, matcher, text = random.Random(seed), first.deep_copy(), b""
        while not matcher.is_stopped() and len(text) < 400:
            llguidance.numpy.fill_next_token_bitmask(matcher, bitmask)
            allowed = [i for i in range(32, 127) if bitmask[0, i // 32] >> (i % 32) & 1]
            if not allowed:
                assert matcher.is_accepting(), (text, matcher.get_error())
                break
            byte = ord(",") if ord(",") in allowed else draw.choice(allowed)
            matcher.consume_token(byte)
            text += bytes([byte])
        found.append(text.decode())
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_walk_ends(name):
    schema = CLOSED | SCHEMAS[name]
    lark = 'start: "x" body\nbody: %json ' + json.dumps(
        {**schema, "x-guidance": {"whitespace_flexible": False}}
    )
    for constraint in (Constraint("json", json.dumps(schema)), Constraint("grammar", lark)):
        texts = walks(constraint)
        assert any("," in text for text in texts) or name == "required", texts[:5]
        if name != "others":  # llguidance may write a name of a pattern again and again
            for text in texts:
                json.loads(text.removeprefix("x"))


def test_a_name_keeps_both_schemas():
    schema = CLOSED | {
        "properties": {"a": {"type": "integer", "allOf": [{"maximum": 7}]}},
        "patternProperties": {"^a$": {"minimum": 3}},
    }
    matcher = compile_grammar(Constraint("json", json.dumps(schema)), BYTES)
    for value, fits in ((2, False), (3, True), (7, True), (8, False)):
        text = json.dumps({"a": value})
        taken = matcher.deep_copy().try_consume_tokens(list(text.encode()))
        assert (taken == len(text)) == fits


def test_an_invalid_pattern_is_named():
    schema = CLOSED | {"properties": {"a": {}}, "patternProperties": {"(": {}}}
    with pytest.raises(ValueError, match="regex"):
        compile_grammar(Constraint("json", json.dumps(schema)), BYTES)
