"""Refuse numbers of JSON schemas that llguidance would round."""

import decimal
import reprlib
from collections.abc import Iterator
from typing import Any

from rjax.structured.schemas import subschemas

_EXACT = 2**53  # llguidance reads numbers as float64, which holds all integers up to here
_INT64_MAX = 2**63 - 1
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_numbers(schema: dict[str, Any]) -> None:
    """Check that no number which constrains values would be rounded.

    A ``maximum`` of integers may be the largest number of a 64-bit type: the largest integer that
    is generated is then 2**63 - 1.

    Raises:
        ValueError: a number would be rounded.
    """
    for part in subschemas(schema):
        for keyword in ("enum", "const"):
            for number in _integers(part.get(keyword)):
                if not _is_float64(number):
                    _refuse(keyword, number)
        for keyword in _BOUNDS:
            number = part.get(keyword)
            if isinstance(number, float) and number.is_integer():
                number = int(number)
            if isinstance(number, int) and not _is_exact_bound(keyword, number, part):
                _refuse(keyword, number)


def _is_exact_bound(keyword: str, number: int, schema: dict[str, Any]) -> bool:
    if abs(number) < _EXACT:
        return True
    integers = schema.get("type") == "integer"
    if keyword == "maximum" and integers and number >= _INT64_MAX:
        return True  # llguidance takes the largest int64
    if keyword == "exclusiveMaximum":
        return integers and number > _INT64_MAX
    if keyword not in ("minimum", "maximum") or not _is_float64(number):
        return False
    # Bounds of numbers that may have a fraction keep the digits of the shortest decimal alone.
    return integers or decimal.Decimal(repr(float(number))) == number


def _is_float64(number: int) -> bool:
    return abs(number) <= _INT64_MAX and float(number) == number


def _integers(value: Any) -> Iterator[int]:
    """All integers in a JSON value."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, int):
            yield item
        elif isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list):
            left += item


def _refuse(keyword: str, number: int) -> None:
    raise ValueError(
        f"{keyword} holds {reprlib.repr(number)}, which would be rounded; give integers of up to "
        "2**53, or the digits as a string"
    )
