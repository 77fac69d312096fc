"""Constraints on generated text."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint that a text must match.

    Attributes:
        kind: kind of the source.
        source: a JSON schema (as text), a regex, or a grammar (Lark or GBNF).
        outer: a Lark grammar of the whole text, in which ``@body`` stands for the source; empty if
            the source describes the whole text.
    """

    kind: Literal["json", "regex", "grammar"]
    source: str
    outer: str = ""


def json_source(schema: Mapping[str, Any]) -> str:
    """The source of a JSON schema.

    Raises:
        ValueError: a number is not finite.
        TypeError: a value is not JSON.
        RecursionError: the schema nests too deeply.
    """
    return json.dumps(schema, allow_nan=False)


def choice_source(choices: Sequence[str]) -> str:
    """The source of a grammar that allows one of several texts.

    They are one terminal: the parser follows at most 2,000 rules at once, the lexer any number.
    """
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in choices)
