"""A record that is on disk after each of its rows, so that a run cut short keeps what it found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.records import record, save


class Kept:
    """Rows of one benchmark as they come.

    Args:
        path: file, or None to keep nothing.
        settings: of the command line.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, settings
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    @property
    def record(self) -> dict[str, Any]:
        """All of it so far."""
        return record("bench.kernels", self.rows, self._settings, **self.more)

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Take in rows and write the file."""
        self.rows += [dict(row) for row in rows]
        if self.path is not None:
            save(self.path, self.record)
