"""Pictures of results, in one style."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws files; needs no screen

import matplotlib.pyplot as plt
from matplotlib.colors import LogNorm

_STYLE: Any = {
    "figure.figsize": (6.4, 3.8),
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}
# Distinguishable for colour-blind readers and in print (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Points = Sequence[tuple[float, float]]


def lines(
    path: Path,
    series: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    log: str = "",
) -> None:
    """Draw one line per series; ``log`` names the logarithmic axes: "", "x", "y" or "xy"."""
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots()
        for i, (name, points) in enumerate(series.items()):
            xs, ys = zip(*sorted(points), strict=True)
            axes.plot(xs, ys, marker="o", label=name, color=_COLOURS[i % len(_COLOURS)])
        if "x" in log:
            smallest = min((x for p in series.values() for x, _ in p if x > 0), default=1)
            # A logarithm has no zero: below the smallest value the axis is linear.
            axes.set_xscale("symlog", base=2, linthresh=smallest)
            ticks = sorted({x for points in series.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        if "y" in log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        _finish(figure, axes, path, title, x, y)


def bars(
    path: Path, groups: Mapping[str, Mapping[str, float]], *, title: str, x: str, y: str
) -> None:
    """Groups of bars: group name to series name to height."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.8 / max(1, len(names))
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots()
        for i, name in enumerate(names):
            heights = [group.get(name, float("nan")) for group in groups.values()]
            places = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
            axes.bar(places, heights, width, label=name, color=_COLOURS[i % len(_COLOURS)])
        axes.set_xticks(range(len(groups)), list(groups))
        _finish(figure, axes, path, title, x, y)


def cells(
    path: Path, values: Mapping[tuple[float, float], float], *, title: str, x: str, y: str
) -> None:
    """A map of ratios: (x, y) to a factor, blue above 1 and red below, each cell with its number.

    Both axes have one equal step for each value that occurs, so that powers make a logarithmic one.
    """
    columns = sorted({place[0] for place in values})
    lines_up = sorted({place[1] for place in values})
    picture = [[values.get((c, r), float("nan")) for c in columns] for r in lines_up]
    most = max(2.0, *(max(v, 1 / v) for v in values.values() if v > 0))
    with plt.rc_context(_STYLE | {"axes.grid": False}):
        figure, axes = plt.subplots()
        scale = LogNorm(1 / most, most)
        axes.imshow(picture, norm=scale, cmap="RdBu", origin="lower", aspect="auto")
        for (c, r), value in values.items():
            ink = "black" if 0.2 < scale(value) < 0.8 else "white"
            place = (columns.index(c), lines_up.index(r))
            axes.text(*place, f"{value:.3g}", ha="center", va="center", fontsize=8, color=ink)
        axes.set_xticks(range(len(columns)), [f"{c:g}" for c in columns])
        axes.set_yticks(range(len(lines_up)), [f"{r:g}" for r in lines_up])
        _finish(figure, axes, path, title, x, y)


def _finish(figure, axes, path: Path, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version in the file, so that equal results give equal bytes.
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)
