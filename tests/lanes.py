"""Lanes: each test is in one part of the suite, and in the default run unless it is thorough.

``python -m tests.lanes system`` prints the folders and files of a lane.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LANES = {
    "unit": (
        *("attention", "bench", "cli", "docs", "frontend", "models", "sampling", "structure"),
        "tables",
    ),
    "engine": ("engine", "engine_channel", "functional"),
    "lowering": ("kernels",),
    "server": ("serve",),
    "clients": ("clients",),
    "system": (
        *("distribution", "docs/test_examples.py"),
        *("serve/replicas/test_fleet.py", "serve/test_page_in_chromium.py"),
    ),
}
"""Folders and files of each lane; the longest path decides."""
OUTSIDE = ("gpu", "slow")
"""Markers of tests that are in no lane: `.ci/run` does not run them."""
_LANE_OF = {path: lane for lane, paths in LANES.items() for path in paths}


def lane_of(path: Path) -> str | None:
    """The lane of a test file; None for a file in no folder of the table."""
    inside = path.relative_to(TESTS)
    places = [str(inside), *map(str, inside.parents)]
    return next((_LANE_OF[place] for place in places if place in _LANE_OF), None)


def assign(items: Iterable[pytest.Item]) -> None:
    """Mark what a default run leaves out of a sampled test, then each test with its lane.

    Tests of the system lane that share a folder run in one process (``--dist loadgroup``): their
    fixtures take minutes.
    """
    items = list(items)
    sampled = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not _is_outside(item):
            sampled[item.nodeid.split("[")[0]].append(item)
    for cases in sampled.values():
        _leave_out(cases, **_sample_sizes(*cases[0].get_closest_marker("sample").args))
    for item in items:
        lane = None if _is_outside(item) else lane_of(item.path)
        if lane is not None:
            item.add_marker(lane)
        if lane == "system":
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


def _is_outside(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in OUTSIDE)


def _sample_sizes(default: int, thorough: int = 10**9) -> dict[str, int]:
    return {"default": default, "thorough": thorough}


def _leave_out(cases: list[pytest.Item], default: int, thorough: int) -> None:
    """Mark the cases beyond the default ones as thorough, and those beyond these too as slow."""
    kept = sample(len(cases), default)
    others = [case for number, case in enumerate(cases) if number not in kept]
    more = sample(len(others), thorough)
    for number, case in enumerate(others):
        case.add_marker("thorough" if number in more else "slow")


def sample(total: int, count: int) -> set[int]:
    """Numbers of the cases that a default run takes, spread over all of them.

    Cases of two crossed parameters are in the order of rows; the numbers move on by one column a
    row, so that they do not all lie in one column.
    """
    if count >= total:
        return set(range(total))
    if count == 0:
        return set()
    step = total // count
    return {k * total // count + k % step for k in range(count)}


if __name__ == "__main__":
    print(*(f"tests/{path}" for lane in sys.argv[1:] for path in LANES[lane]))
