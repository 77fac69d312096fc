"""Grammar rules of parameters whose values are written without JSON's quotes."""

import dataclasses
import json
import re
from typing import Any

from rjax.serve.parsing.tools.base import NAME
from rjax.serve.parsing.tools.parameter_schema import NOTES, ParameterSchema
from rjax.serve.parsing.tools.values import json_type
from rjax.serve.protocol.requests import Tool
from rjax.structured.lark import SpecialTokens, quoted, regex_text

KEY = r"[^<>\n]{1,256}"  # a parameter's name
ANY_TEXT = r"/(.|\n)*/"
_NO_STRING = ["integer", "number", "boolean", "null", "array", "object"]
_MOST_REFERENCES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterTexts:
    """The texts of a call that has tags for each parameter.

    Attributes:
        name: the format's name.
        head: text before the parameters, with ``NAME`` for the function's name.
        tail: tag after the parameters, before the closing tag of the call.
        key_begin, key_end: texts around a parameter's name.
        padding: white space around a value.
        value_end: tag after a value.
        gap: text after a parameter.
        python_words: whether the template writes booleans and null as in Python.
    """

    name: str
    head: str
    tail: str = ""
    key_begin: str
    key_end: str
    padding: str = ""
    value_end: str
    gap: str
    python_words: bool = False


class ParameterRules:
    """Makes the rules of ``call_{i}``; see `ToolFormat.call_rules`."""

    def __init__(
        self,
        fmt: ParameterTexts,
        i: int,
        tool: Tool,
        special_tokens: SpecialTokens,
        *,
        strict: bool,
        literal: bool,
    ) -> None:
        self._fmt, self._i, self._special_tokens = fmt, i, special_tokens
        self._name = tool.function.name
        strict = strict or bool(tool.function.strict)
        self._schema = ParameterSchema(tool.function, fmt.name, strict=strict, literal=literal)
        self._rules: list[str] = []

    def rules(self) -> list[str]:
        """The rules.

        Raises:
            InvalidRequestError: they cannot express the schema.
        """
        fmt, i, schema = self._fmt, self._i, self._schema
        parts, names = [], []
        for number, (key, of_value, required) in enumerate(schema):
            if not re.fullmatch(KEY, key) or key != key.strip():
                raise schema.refusal(f"the property name {key[:100]!r}")
            self._parameter(f"{i}_{number}", quoted(key), of_value)
            parts.append(f"parameter_{i}_{number}" + ("" if required else "?"))
            names.append(regex_text(key))
        if schema.others is not False:
            others = f" & ~/({'|'.join(names)})/" if names else ""
            self._rules.append(f"KEY_{i}: /{KEY}/{others}")
            self._parameter(f"{i}_{len(parts)}", f"KEY_{i}", schema.others)
            parts.append(f"parameter_{i}_{len(parts)}*")
        head, tail = fmt.head.replace(NAME, self._name), fmt.tail
        call = f"call_{i}: {self._text(head)} {' '.join(parts)} {self._text(tail)}"
        return [call, *self._rules]

    def _text(self, text: str) -> str:
        return self._special_tokens.rule(text)

    def _parameter(self, name: str, key: str, schema: Any) -> None:
        fmt = self._fmt
        begin, end = self._text(fmt.key_begin), self._text(fmt.key_end + fmt.padding)
        rule = f"parameter_{name}: {begin} {key} {end} value_{name} {quoted(fmt.gap)}"
        self._rules.append(rule)
        self._value(name, schema)

    def _value(self, name: str, schema: Any) -> None:
        """The rule ``value_{name}``: a value and the tag after it."""
        texts: list[str] = []  # terminals of strings
        words: list[str] = []
        documents: list[dict[str, Any]] = []  # schemas of JSON
        for branch in branches(self._schema, schema):
            self._sort(branch, texts, words, documents)
        if texts and documents:
            bare = all(part.keys() <= NOTES | {"type"} for part in documents)
            if not bare or ANY_TEXT not in texts:
                raise self._schema.refusal("a choice between a string and another type")
            documents = []  # any text includes them
        if texts:
            self._text_value(name, texts, words)
            return
        choices = [quoted(word) or '""' for word in words]
        for number, part in enumerate(documents):
            choices.append(f"json_{name}_{number}")
            self._rules.append(f"json_{name}_{number}: {self._schema.document(part)}")
        closing = self._text(self._fmt.padding + self._fmt.value_end)
        self._rules.append(f"value_{name}: ({' | '.join(choices)}) {closing}")

    def _text_value(self, name: str, texts: list[str], words: list[str]) -> None:
        padding, tag = self._fmt.padding, self._fmt.value_end
        terminals = []
        for number, text in enumerate(texts):
            terminals.append(f"TEXT_{name}_{number}")
            self._rules.append(f"{terminals[-1]}: {text}")
        either = " | ".join([*terminals, *map(quoted, words)])
        self._rules.append(f"ANY_{name}: {either}")
        if self._special_tokens.is_special(tag):
            self._rules.append(f"VALUE_{name}: ANY_{name} {quoted(padding)}")
            self._rules.append(f"value_{name}: VALUE_{name} {self._text(tag)}")
        else:  # the parser ends a value at the first tag
            tagged = rf"/(.|\n)*{regex_text(tag)}(.|\n)*/"
            self._rules.append(f"VALUE_{name}: ANY_{name} & ~{tagged}")
            self._rules.append(f"value_{name}[lazy]: VALUE_{name} {quoted(padding + tag)}")

    def _sort(
        self,
        schema: dict[str, Any],
        texts: list[str],
        words: list[str],
        documents: list[dict[str, Any]],
    ) -> None:
        """Add a branch to the strings, words or JSON documents of a value."""
        kind = schema.get("type")
        own = schema.keys() - NOTES
        if {"enum", "const"} & own and own <= {"enum", "const", "type"}:
            values = schema.get("enum", [schema.get("const")])
            for value in values:
                if has_type(value, kind):
                    words += self._words(value)
        elif kind == "string":
            texts.append(string_terminal(self._schema, schema, own - {"type"}))
        elif kind in ("boolean", "null") and own == {"type"}:
            for value in [None] if kind == "null" else [True, False]:
                words += self._words(value)
        elif not own:
            texts.append(ANY_TEXT)
        else:
            documents.append(schema if kind else schema | {"type": _NO_STRING})

    def _words(self, value: Any) -> list[str]:
        """The texts of one value."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if self._fmt.value_end in text:
            raise self._schema.refusal(f"the value {text[:100]!r}")
        is_word = value is None or isinstance(value, bool)
        return [text, str(value)] if is_word and self._fmt.python_words else [text]


def branches(
    whole: ParameterSchema, schema: Any, depth: int = _MOST_REFERENCES
) -> list[dict[str, Any]]:
    """A schema of a parameter as a choice of schemas that have one type each, or none.

    Args:
        whole: the schema of all parameters.
        schema: that of one, or a part of it.
        depth: most nested references and combined schemas that are followed.
    """
    if schema is True:
        return [{}]
    if not isinstance(schema, dict) or not depth:
        raise whole.refusal("a parameter without a possible value")
    schema, refers = whole.followed(schema)
    if refers:
        return branches(whole, schema, depth - 1)
    own = schema.keys() - NOTES
    for keyword in ("anyOf", "oneOf"):
        if own == {keyword}:
            return [one for part in schema[keyword] for one in branches(whole, part, depth - 1)]
    if isinstance(schema.get("type"), list):
        return [schema | {"type": one} for one in schema["type"]]
    return [schema]


def string_terminal(whole: ParameterSchema, schema: dict[str, Any], own: set[str]) -> str:
    """The Lark terminal of a string.

    Args:
        whole: the schema of all parameters.
        schema: that of the string.
        own: its keywords besides its type.
    """
    for keyword in sorted(own - {"pattern", "minLength", "maxLength"}):
        raise whole.refusal(f"{keyword!r} of a string")
    parts = []
    if "pattern" in schema:
        parts.append(_pattern(whole, schema["pattern"]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(rf"/(.|\n){{{least},{most}}}/")
    return " & ".join(parts) or ANY_TEXT


def _pattern(whole: ParameterSchema, pattern: str) -> str:
    """The terminal of texts in which a pattern is found."""
    start, end = pattern.startswith("^"), bool(re.search(r"(?<!\\)(\\\\)*\$$", pattern))
    body = pattern[start : len(pattern) - end]
    outside = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", body)
    top = outside
    while top != (inner := re.sub(r"\([^()]*\)", "", top)):
        top = inner
    if re.search(r"[$^]", outside) or ("|" in top and (start or end)):
        raise whole.refusal(f"the pattern {pattern[:100]!r}")
    body = re.sub(r"\\.|/", lambda m: r"\/" if m.group() == "/" else m.group(), body)
    before, after = ("" if start else r"(.|\n)*"), ("" if end else r"(.|\n)*")
    return f"/{before}({body}){after}/"


def has_type(value: Any, kind: object) -> bool:
    """Whether a value has a JSON type; any has None."""
    found = json_type(value)
    return kind in (None, found) or (kind == "number" and found == "integer")
