"""Command-line options that benchmarks share."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rjax.benchmarks.text_tables import text
from rjax.cli.parser import OneLineParser
from rjax.config import AutoInt
from rjax.errors import InvalidConfigError

_START = time.monotonic()


def benchmark_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options of every benchmark of
    ``rjax bench``."""
    p = OneLineParser(
        prog=name,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--json", metavar="FILE", type=Path, help="file for the result")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def add_time_limit(p: argparse.ArgumentParser) -> None:
    """Add --seconds, for benchmarks that iterate over points with ``in_time``."""
    p.add_argument("--seconds", type=float, help="start no further point after this many seconds")


def add_relay_modes(p: argparse.ArgumentParser) -> None:
    """Add --relay, for benchmarks that run the engine in several modes."""
    modes = "auto", "on", "off"
    told = f"modes to compare: {', '.join(modes)}"
    p.add_argument("--relay", type=some_of(*modes), default="auto,off", help=told)


def in_time[T](
    points: Sequence[T], seconds: float | None, *, desc: str, quiet: bool
) -> Iterator[T]:
    """Iterate over the points with a progress bar, until the process is ``seconds`` old."""
    for done, point in enumerate(tqdm(points, desc=desc, disable=quiet)):
        if seconds is not None and time.monotonic() - _START > seconds:
            left = len(points) - done
            print(f"{desc}: {left} of {len(points)} points left out", file=sys.stderr)
            return
        yield point


def whole(least: int) -> Callable[[str], int]:
    """A parser of a whole number with a minimum, for ``type=`` of an option."""

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
    """A parser of comma-separated whole numbers, ``count`` of them if given, for ``type=`` of an
    option."""

    def parse(given: str) -> list[int]:
        found = [whole(least)(x) for x in given.split(",")]
        if count not in (None, len(found)):
            raise argparse.ArgumentTypeError(f"{given!r}: give {count} numbers, commas between")
        return found

    return parse


def whole_or_auto(least: int) -> Callable[[str], AutoInt]:
    """A parser of a whole number with a minimum, or of auto, for ``type=`` of an option."""

    def parse(given: str) -> AutoInt:
        return "auto" if given == "auto" else whole(least)(given)

    return parse


def wholes_or_auto(least: int) -> Callable[[str], list[AutoInt]]:
    """A parser of comma-separated whole numbers, or auto in place of one, for ``type=`` of an
    option."""

    def parse(given: str) -> list[AutoInt]:
        return [whole_or_auto(least)(x) for x in given.split(",")]

    return parse


def some_of(*names: str) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of a list, for ``type=`` of an option."""

    def parse(given: str) -> list[str]:
        chosen = given.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{given!r}: choose from {', '.join(names)}")
        return chosen

    return parse


def check_picture(path: Path | None) -> None:
    """Check that a picture can be drawn, before anything is measured.

    Raises:
        InvalidConfigError: matplotlib is not installed.
    """
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfigError("--png needs matplotlib; install it")


def print_rows(found: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Print the rows of a record as a table.

    Raises:
        InvalidConfigError: there are no rows.
    """
    if not found["rows"]:
        raise InvalidConfigError("nothing was measured in the time given; raise --seconds")
    print(found["environment"]["device"])
    print(text(found["rows"], columns))
