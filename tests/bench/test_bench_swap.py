"""The benchmark of swapping runs at a small size and keeps a record."""

import pytest

from bench import swap
from rjax.benchmarks.records import load


@pytest.mark.slow
def test_swap(tmp_path, capsys):
    path = tmp_path / "swap.json"
    small = ["--shapes=tiny", "--batch=2", "--own=40", "--pages=1,4", "--steps=2", "--quiet"]
    swap.main([*small, f"--json={path}"])
    rows = load(path)["rows"]
    assert [row["pages"] for row in rows] == [1, 4]
    assert rows[1]["mib"] == 4 * rows[0]["mib"]
    for row in rows:
        grown = row["out_ms"] + row["in_ms"] - 2 * row["step_ms"]
        assert row["gb_s"] == pytest.approx(2 * row["mib"] * 2**20 / row["alone_ms"] / 1e6)
        assert row["hidden"] == pytest.approx(1 - grown / row["alone_ms"])
    assert "swapping out" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="fewer"):
        swap.main([*small, "--pages=100000"])
