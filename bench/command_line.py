"""What the command lines of the benchmarks have in common."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.records import RESULTS, save
from bench.tables import text


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


def numbers(given: str) -> list[int]:
    """Comma-separated whole numbers, for ``type=`` of an option."""
    return [int(x) for x in given.split(",")]


def keep(
    found: Mapping[str, Any], columns: Mapping[str, str], given: Path | None, name: str
) -> Path | None:
    """Print a record's rows and save it where asked, or under bench/results/ on a GPU."""
    print(found["environment"]["device"])
    print(text(_rows(found), columns))
    path = given
    if path is None and jax.default_backend() == "gpu":
        path = RESULTS / f"{name}.json"
    if path is not None:
        save(path, found)
    return path


def _rows(found: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return found["rows"]
