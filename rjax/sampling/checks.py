"""Checks of user values: each function returns the plain Python value or raises."""

import math
import numbers
import operator
import reprlib
from collections.abc import Iterable
from typing import Any, Never

import numpy as np

from rjax.errors import InvalidRequestError


def shown(value: object) -> str:
    """A short ``repr`` for a message, safe for huge numbers and long text."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer beyond the interpreter's limit of printed digits
        return f"a {type(value).__name__} of several thousand digits"


def refuse(name: str, value: object, remedy: str) -> Never:
    """Raise an error that says what was found and what to give instead.

    Raises:
        InvalidRequestError: always.
    """
    raise InvalidRequestError(f"{name} is {shown(value)}; {remedy}")


def integer(name: str, value: object, low: int, high: int, *, note: str = "") -> int:
    """An integer in the closed range [low, high]; NumPy integers are accepted, bools are not.

    Raises:
        InvalidRequestError: another type, or outside the range.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = operator.index(value)
        if low <= number <= high:
            return number
    refuse(name, value, f"give a whole number from {low} to {high}{note}")


def real(
    name: str, value: object, low: float, high: float, *, above_low: bool = False, note: str = ""
) -> float:
    """A finite number in [low, high], or in (low, high] if ``above_low``; bools are not accepted.

    Raises:
        InvalidRequestError: another type, NaN, infinite, or outside the range.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and low <= number <= high and not (above_low and number == low):
            return number
    bounds = f"above {low:g} and up to {high:g}" if above_low else f"from {low:g} to {high:g}"
    refuse(name, value, f"give a number {bounds}{note}")


def boolean(name: str, value: object) -> bool:
    """True or False; NumPy bools are accepted, other truthy values are not.

    Raises:
        InvalidRequestError: another type.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    refuse(name, value, "give True or False")


def sequence(name: str, value: Any, most: int, remedy: str) -> tuple[Any, ...]:
    """The items of a list, tuple, set or array, at most ``most`` of them.

    Raises:
        InvalidRequestError: not iterable, text, a mapping, or too many items.
    """
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        refuse(name, value, remedy)
    if not hasattr(value, "__len__"):  # a generator could be endless
        refuse(name, value, remedy)
    if (found := len(value)) > most:  # type: ignore[arg-type]
        raise InvalidRequestError(f"{name} has {found} entries; give at most {most}")
    return tuple(value)


def token_ids(name: str, value: Any, most: int) -> tuple[int, ...]:
    """Distinct token ids in the order given.

    Raises:
        InvalidRequestError: not a sequence of whole numbers from 0 to 2**31-1, or too many.
    """
    items = sequence(name, value, most, "give a list of token ids")
    if items and set(map(type, items)) == {int} and min(items) >= 0 and max(items) < 2**31:
        return tuple(dict.fromkeys(items))  # fast path for plain ints
    checked = (integer(f"{name}[{i}]", item, 0, 2**31 - 1) for i, item in enumerate(items))
    return tuple(dict.fromkeys(checked))
