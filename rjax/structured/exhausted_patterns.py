"""Remove pattern properties that can match no further name.

A closed object may have a pattern whose names are all in ``properties`` or ``required``. llguidance
would still offer a comma for it, after which no name fits.
"""

import functools
import json
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from rjax.structured.schemas import subschemas

_CACHE_SIZE = 256


def merge_exhausted_patterns(schema: dict[str, Any]) -> None:
    """Replace these patterns, in place, by a property for each name that they match."""
    for part in subschemas(schema):
        patterns, properties = part.get("patternProperties"), part.get("properties", {})
        required = part.get("required", [])
        if (
            part.get("additionalProperties") is not False
            or not isinstance(patterns, dict)
            or not isinstance(properties, dict)
            or not isinstance(required, list)
        ):
            continue
        names = [name for name in dict.fromkeys([*properties, *required]) if isinstance(name, str)]
        for pattern in list(patterns) if names else ():
            matched = _exhausted_by(pattern, tuple(names))
            if matched is not None:
                value = patterns.pop(pattern)
                for name in matched:
                    properties[name] = _both(properties.get(name, True), value)
                part["properties"] = properties


@functools.lru_cache(_CACHE_SIZE)
def _exhausted_by(pattern: str, names: tuple[str, ...]) -> list[str] | None:
    """The names that a pattern matches; None if it also matches others, or is not valid."""
    if _matches_others(pattern, names):
        return None
    return [name for name in names if _matches(pattern, name)]


def _both(one: Any, other: Any) -> Any:
    """A schema of the values that match two schemas."""
    if one is True or one == other:
        return other
    if other is True or not isinstance(one, dict):
        return one
    return {**one, "allOf": [*one.get("allOf", []), other]}


def _matches_others(pattern: str, names: tuple[str, ...]) -> bool:
    others = {"properties": dict.fromkeys(names, False), "patternProperties": {pattern: True}}
    matcher = _matcher(others)
    if matcher.is_error():
        return True
    matcher.consume_token(ord("{"))
    bitmask = llguidance.numpy.allocate_token_bitmask(1, _byte_tokenizer().vocab_size)
    llguidance.numpy.fill_next_token_bitmask(matcher, bitmask)
    word, bit = divmod(ord('"'), 32)
    return bool(np.uint32(bitmask[0, word]) >> bit & 1)


def _matches(pattern: str, name: str) -> bool:
    matcher = _matcher({"patternProperties": {pattern: True}})
    text = json.dumps({name: 1}, ensure_ascii=False).encode()
    return matcher.try_consume_tokens(list(text)) == len(text)


def _matcher(schema: dict[str, Any]) -> llguidance.LLMatcher:
    source = json.dumps({"type": "object", "additionalProperties": False, **schema})
    grammar = llguidance.LLMatcher.grammar_from_json_schema(
        source, overrides={"whitespace_flexible": False, "key_separator": ": "}
    )
    return llguidance.LLMatcher(_byte_tokenizer(), grammar, log_level=0)


@functools.cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")
