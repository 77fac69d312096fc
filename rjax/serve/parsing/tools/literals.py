"""Python literals as JSON."""

import json
import re
from typing import Any

# A string that is not closed ends with the text, so that a text is read in linear time.
_TOKEN = re.compile(
    r"""(?P<quote>["'])(?P<body>(?:\\.|(?!(?P=quote))[^\\])*+)(?P<end>(?P=quote)|\\?\Z)"""
    r"|\b(?:True|False|None)\b",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPED = re.compile(r'\\(x[0-9a-fA-F]{2}|.)|["\x00-\x1f]', re.DOTALL)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse)


def literals_as_json(text: str) -> str:
    """A text with its Python strings and words written as JSON's; those of JSON stay.

    Line breaks in strings, which JSON does not allow, are escaped.
    """
    return _TOKEN.sub(_token, text)


def _token(found: re.Match[str]) -> str:
    if found["quote"] is None:
        return _WORDS[found.group()]
    if found["end"] != found["quote"]:
        return found.group()
    return f'"{_ESCAPED.sub(_character, found["body"])}"'


def _character(found: re.Match[str]) -> str:
    escaped = found.group(1)
    if escaped is None:
        return json.dumps(found.group())[1:-1]
    if escaped == "'":
        return "'"
    if escaped == "\n":
        return ""  # a line that goes on
    return f"\\u00{escaped[1:]}" if len(escaped) > 1 else f"\\{escaped}"
