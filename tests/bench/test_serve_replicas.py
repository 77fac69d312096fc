"""The load on fleets of one and of two replicas gets all its answers and keeps a record."""

import pytest

from bench import serve_replicas
from rjax.benchmarks.records import load

pytestmark = pytest.mark.slow  # starts Ray twice


def test_one_and_two_replicas(tmp_path):
    kept = tmp_path / "serve_replicas.json"
    serve_replicas.main(
        (
            f"--json {kept} --shapes tiny --requests 8 --prefixes 2 --prefix-words 32 "
            "--suffix-words 4 --max-tokens 4 --max-num-seqs 4"
        ).split()
    )
    rows = load(kept)["rows"]
    assert [row["replicas"] for row in rows] == [1, 2]
    assert [(row["completed"], row["failed"]) for row in rows] == [(8, 0)] * 2
    assert [row["output_tokens"] for row in rows] == [32] * 2
    assert rows[0]["of_first"] == 1 and rows[1]["of_first"] > 0
