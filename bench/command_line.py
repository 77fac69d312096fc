"""What the command lines of the benchmarks have in common."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from tqdm import tqdm

from bench.records import RESULTS, save
from bench.text_tables import text
from rjax.cli.errors import OneLineParser, run_command
from rjax.cli.process import run_process

_START = time.monotonic()


def command_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options of every benchmark. Its
    errors are one line."""
    p = OneLineParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--json", type=Path, help="file for the result; on a GPU kept without asking")
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def add_time_limit(p: argparse.ArgumentParser) -> None:
    """For benchmarks of many points, which go through them with ``in_time``."""
    p.add_argument("--seconds", type=float, help="begin no further point when so many are over")


def add_relay_modes(p: argparse.ArgumentParser) -> None:
    """For benchmarks that run the engine in several modes."""
    modes = "auto", "on", "off"
    told = f"modes to compare: {', '.join(modes)}"
    p.add_argument("--relay", type=some_of(*modes), default="auto,off", help=told)


def in_time[T](
    points: Sequence[T], seconds: float | None, *, desc: str, quiet: bool
) -> Iterator[T]:
    """The points, with a progress bar, as long as the process is younger than ``seconds``."""
    for done, point in enumerate(tqdm(points, desc=desc, disable=quiet)):
        if seconds is not None and time.monotonic() - _START > seconds:
            left = len(points) - done
            print(f"{desc}: {left} of {len(points)} points left out", file=sys.stderr)
            return
        yield point


def whole(least: int) -> Callable[[str], int]:
    """For ``type=`` of an option: a whole number that is at least so large."""

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
    """For ``type=`` of an option: such numbers with commas between, ``count`` of them or any."""

    def parse(given: str) -> list[int]:
        found = [whole(least)(x) for x in given.split(",")]
        if count not in (None, len(found)):
            raise argparse.ArgumentTypeError(f"{given!r}: give {count} numbers, commas between")
        return found

    return parse


def some_of(*names: str) -> Callable[[str], list[str]]:
    """For ``type=`` of an option: some of these names with commas between."""

    def parse(given: str) -> list[str]:
        chosen = given.split(",")
        if not set(chosen) <= set(names):
            raise argparse.ArgumentTypeError(f"{given!r}: choose from {', '.join(names)}")
        return chosen

    return parse


def run(module: str, main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's ``main`` as the process, with one line for what its user got wrong."""
    run_process(module, lambda: run_command(module, lambda: main() or 0))


def target(given: Path | None, name: str) -> Path | None:
    """Where a result goes: as asked for, on a GPU else under bench/results/, else nowhere."""
    if given is None and jax.default_backend() == "gpu":
        return RESULTS / f"{name}.json"
    return given


def save_part(found: Mapping[str, Any], given: Path | None, name: str) -> None:
    """Save what is measured so far, for the case that the rest is not reached."""
    path = target(given, name)
    if path is not None:
        save(path, found)


def keep(
    found: Mapping[str, Any], columns: Mapping[str, str], given: Path | None, name: str
) -> Path | None:
    """Print a record's rows and save it where ``target`` says; without rows it is no result.

    Raises:
        SystemExit: there are no rows.
    """
    if not _rows(found):
        raise SystemExit("nothing was measured in the time given")
    print(found["environment"]["device"])
    print(text(_rows(found), columns))
    path = target(given, name)
    if path is not None:
        save(path, found)
    return path


def _rows(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return found["rows"]
