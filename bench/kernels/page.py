"""Keeps the figures in bench/kernels/README.md those of the results."""

import json
import re
from pathlib import Path

from bench.records import RESULTS

README: Path = Path(__file__).parent / "README.md"
"""A page written by hand but for its figures, which ``python -m bench.report`` puts in."""

# <!--us CASE-->figure<!--/-->: the case's time; "share" is its floor over its time.
_FIGURE = re.compile(r"<!--(us|share) (.+?)-->(.*?)<!--/-->")


def with_figures(text: str, results: Path = RESULTS) -> str:
    """The page with every marked figure as kernels.json has it.

    Raises:
        ValueError: a mark names a case that the results do not have, or have no time of.
    """
    found = json.loads((results / "kernels.json").read_text(encoding="utf-8"))
    rows = {row["case"]: row for row in found["rows"] if row.get("us")}

    def figure(match: re.Match[str]) -> str:
        kind, case, _ = match.groups()
        if case not in rows:
            raise ValueError(f"kernels.json has no time of {case!r}, which {README.name} shows")
        row = rows[case]
        value = f"{row['us']:.3g}" if kind == "us" else f"{row['floor_us'] / row['us']:.2f}"
        return f"<!--{kind} {case}-->{value}<!--/-->"

    return _FIGURE.sub(figure, text)
