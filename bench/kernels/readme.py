"""Fills the figures in bench/kernels/README.md from the results."""

import json
import re
from pathlib import Path

from bench import RESULTS

README: Path = Path(__file__).parent / "README.md"
"""A handwritten page; ``python -m bench.report`` fills in its figures."""

# <!--us CASE-->figure<!--/-->: the case's time; "share" is its roofline over its time.
_FIGURE = re.compile(r"<!--(us|share) (.+?)-->(.*?)<!--/-->")


def with_figures(text: str, results: Path = RESULTS) -> str:
    """The page with every marked figure replaced by that of kernels.json.

    Raises:
        ValueError: a mark names a case without a time in the results.
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
