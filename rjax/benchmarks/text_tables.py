"""Formatting of result tables, for the terminal and for Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A Markdown table.

    Args:
        rows: one mapping per line; a missing key or None gives an empty cell.
        columns: key to heading, in order.
    """
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def text(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table with aligned columns, for a terminal."""
    cells = [list(columns.values())] + [[cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(x.rjust(w) for x, w in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def cell(value: Any) -> str:
    """Format a value: three significant digits, all digits of a whole number."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value != value:
            return "not a number"
        if value == 0:
            return "0"
        if abs(value) >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}" if abs(value) >= 1e-3 else f"{value:.1e}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
