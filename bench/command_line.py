"""Shared command line options of the benchmarks."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from bench import RESULTS, ROOT
from rjax.benchmarks.records import save
from rjax.benchmarks.text_tables import text
from rjax.cli.errors import run_command
from rjax.cli.parser import OneLineParser
from rjax.cli.process import run_process


def command_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, with the options of every benchmark. Its
    errors are one line."""
    p = OneLineParser(
        prog=f"python -m {module}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument(
        "--json", type=Path, help="file for the result; default on a GPU: in bench/results"
    )
    p.add_argument("--quiet", action="store_true", help="no progress bar")
    return p


def run(module: str, main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark's ``main`` as the process; user errors are printed in one line."""
    run_process(module, lambda: run_command(module, lambda: main() or 0))


def side_environment(*, imports_rjax: bool) -> dict[str, str]:
    """The environment variables of a process that measures one side.

    Sides may be different Pythons, so they do not inherit each other's paths.

    Args:
        imports_rjax: whether the side is rjax, of this checkout.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if imports_rjax:
        given = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([given] if given else [])])
    return environment


def target(given: Path | None, name: str) -> Path | None:
    """Path of the result: the given one, on a GPU bench/results/ by default, else None."""
    if given is None and jax.default_backend() == "gpu":
        return RESULTS / f"{name}.json"
    return given


def save_part(found: Mapping[str, Any], given: Path | None, name: str) -> None:
    """Save the points measured so far, in case the run is interrupted."""
    path = target(given, name)
    if path is not None:
        save(path, found)


def keep(
    found: Mapping[str, Any], columns: Mapping[str, str], given: Path | None, name: str
) -> Path | None:
    """Print the rows of a record and save it to the path of ``target``.

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
