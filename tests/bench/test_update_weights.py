"""The benchmark of new weights runs at a small size and keeps a record."""

import math

import pytest

from bench import update_weights
from rjax.benchmarks.records import load


@pytest.mark.thorough
def test_update_weights(tmp_path, capsys):
    path = tmp_path / "update_weights.json"
    options = ["--shapes=tiny", "--rounds=1", "--max-num-seqs=2", "--quiet", f"--json={path}"]
    update_weights.main(options)
    rows = load(path)["rows"]
    assert [row["arrays"] for row in rows] == ["device", "host"]
    assert all(math.isfinite(row["first_s"] + row["seconds"] + row["floor_s"]) for row in rows)
    assert "memory above" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        update_weights.main(["--arrays=disk"])
