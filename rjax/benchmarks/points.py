"""The points of a benchmark: their time limit, their table and their picture."""

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rjax.benchmarks.text_tables import text
from rjax.errors import InvalidConfigError

_START = time.monotonic()


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
