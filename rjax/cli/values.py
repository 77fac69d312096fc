"""Parsers of the values of options, for ``type=``."""

import argparse
from collections.abc import Callable

from rjax.config import AutoInt


def whole(least: int) -> Callable[[str], int]:
    """A parser of a whole number with a minimum."""

    def parse(given: str) -> int:
        try:
            number = int(given)
        except ValueError:
            number = None
        if number is None or number < least:
            raise argparse.ArgumentTypeError(f"{given!r}: give a whole number from {least} on")
        return number

    return parse


def wholes(least: int, count: int | None = None) -> Callable[[str], list[int]]:
    """A parser of comma-separated whole numbers, ``count`` of them if given."""

    def parse(given: str) -> list[int]:
        found = [whole(least)(x) for x in given.split(",")]
        if count not in (None, len(found)):
            raise argparse.ArgumentTypeError(f"{given!r}: give {count} numbers, commas between")
        return found

    return parse


def whole_or_auto(least: int) -> Callable[[str], AutoInt]:
    """A parser of a whole number with a minimum, or of auto."""

    def parse(given: str) -> AutoInt:
        return "auto" if given == "auto" else whole(least)(given)

    return parse


def wholes_or_auto(least: int) -> Callable[[str], list[AutoInt]]:
    """A parser of comma-separated whole numbers, or auto in place of one."""

    def parse(given: str) -> list[AutoInt]:
        return [whole_or_auto(least)(x) for x in given.split(",")]

    return parse


def some_of(*names: str) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of a list."""

    def parse(given: str) -> list[str]:
        chosen = given.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{given!r}: choose from {', '.join(names)}")
        return chosen

    return parse
