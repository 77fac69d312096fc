"""Every test is in one lane, and the lanes together are what `.ci/run` runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lanes import LANES, OUTSIDE, TESTS, lane_of, sample

ROOT = Path(__file__).parents[2]


def test_every_test_file_is_in_a_lane():
    files = [path for path in TESTS.rglob("test_*.py") if path.parent.name != "gpu"]
    assert [str(path) for path in files if lane_of(path) is None] == []


def test_every_path_of_the_table_exists_and_decides():
    paths = [path for paths in LANES.values() for path in paths]
    assert len(paths) == len(set(paths))
    for lane, own in LANES.items():
        for path in own:
            assert (TESTS / path).exists(), path
            assert lane_of(TESTS / path / "x") == lane


def test_every_lane_is_a_marker(pytestconfig: pytest.Config):
    markers = {line.split(":")[0].split("(")[0] for line in pytestconfig.getini("markers")}
    assert {*LANES, *OUTSIDE, "sample", "thorough"} <= markers


def test_contributing_names_every_lane():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("\n| lane |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", table, re.MULTILINE))
    assert {lane: set(re.findall("`(.+?)`", paths)) for lane, paths in rows.items()} == {
        lane: set(paths) for lane, paths in LANES.items()
    }


def test_ci_runs_every_lane(pytestconfig: pytest.Config):
    """With the thorough tests, which a default run leaves out, and not those that are outside."""
    left_out = set(re.findall(r"not (\w+)", " ".join(pytestconfig.getini("addopts"))))
    assert left_out == {"thorough", *OUTSIDE}
    ci = (ROOT / ".ci" / "run").read_text()
    [first] = re.findall("-m '(.+)'", ci)
    assert set(re.findall(r"not (\w+)", first)) == {*OUTSIDE, "system"}
    assert " -m system $(.venv/bin/python -m tests.lanes system)\n" in ci


def test_the_paths_of_a_lane_can_be_asked_for():
    command = [sys.executable, "-m", "tests.lanes", "clients", "system"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = done.stdout.split()
    assert paths == [f"tests/{path}" for lane in ("clients", "system") for path in LANES[lane]]


@pytest.mark.parametrize(("total", "count"), [(1, 3), (3, 3), (20, 4), (16, 4), (7, 2), (100, 7)])
def test_a_sample_has_its_size(total, count):
    found = sample(total, count)
    assert len(found) == min(total, count)
    assert found <= set(range(total))


def test_a_sample_of_crossed_parameters_is_no_column():
    assert {number % 4 for number in sample(16, 4)} == {0, 1, 2, 3}
