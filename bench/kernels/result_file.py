"""A result file that is written after each row, so that an interrupted run keeps its rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rjax.benchmarks.records import record, save


class ResultFile:
    """Rows of one benchmark, saved as they are added.

    Args:
        path: file, or None to save nothing.
        settings: command line options.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, settings
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    @property
    def record(self) -> dict[str, Any]:
        """The record with all rows so far."""
        return record("bench.kernels", self.rows, self._settings, **self.more)

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Add rows and write the file."""
        self.rows += [dict(row) for row in rows]
        if self.path is not None:
            save(self.path, self.record)
