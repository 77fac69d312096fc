"""What the command lines of the benchmarks have in common."""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from bench.records import RESULTS, save
from bench.tables import text

_START = time.monotonic()


def command_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options of every benchmark."""
    p = argparse.ArgumentParser(
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


def numbers(given: str) -> list[int]:
    """Comma-separated whole numbers, for ``type=`` of an option."""
    return [int(x) for x in given.split(",")]


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
