"""Peers of the kernels: each result is checked, each failure is reported."""

import importlib.util
import json
import sys

import jax.numpy as jnp
import pytest

from bench import report
from bench.ceilings import Ceilings
from bench.kernels import __main__ as kernels
from bench.kernels import run_peers
from bench.kernels.backends import choose_kernel
from bench.kernels.cases.attention import make_inputs
from bench.kernels.cases.table import _PEERS, small_cases
from bench.kernels.peers import jax_peers
from bench.kernels.result_file import ResultFile
from rjax.benchmarks.records import load

pytestmark = pytest.mark.usefixtures("optimised", "quickly_compiled_random_numbers")

CEILINGS = Ceilings(copy=4e9, matmul=1e12)
DECODE, RELAY, GROUPS, PREFILL = small_cases()[:4]


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch):
    monkeypatch.setattr(run_peers, "measure_ceilings", lambda: CEILINGS)


@pytest.mark.slow
@pytest.mark.parametrize("case", [RELAY, GROUPS], ids=lambda case: case.name)
def test_every_peer_in_jax_gives_the_right_result(case):
    lines = run_peers.jax_lines(case, choose_kernel("xla"), CEILINGS)
    assert {line["peer"] for line in lines} == set(jax_peers.PEERS)
    assert all(line["error"] < 1e-5 for line in lines), lines


@pytest.mark.thorough
def test_what_a_peer_cannot_express_it_says():
    lines = run_peers.jax_lines(PREFILL, choose_kernel("xla"), CEILINGS)
    (failed,) = [line for line in lines if "failed" in line]
    assert (failed["peer"], "one query row" in failed["failed"]) == ("pallas", True)
    assert [line["peer"] for line in lines if "us" in line] == ["cudnn"]


def test_a_wrong_or_too_large_peer_is_not_timed(monkeypatch):
    def wrong(case, inputs):
        yield jax_peers.Variant("a", lambda k, v: (k,), lambda q, k: q, 1.0)
        yield jax_peers.Variant("b", lambda k, v: (k,), lambda q, k: q, 1e15)

    monkeypatch.setattr(jax_peers, "PEERS", {"wrong": wrong})
    first, second = run_peers.jax_lines(DECODE, choose_kernel("xla"), CEILINGS)
    assert "wrong result" in first["failed"]
    assert "GiB" in second["failed"]


def test_the_contiguous_layout_is_the_pages_in_order():
    inputs = make_inputs(DECODE, 0, 1, jnp.float32)
    (variant,) = jax_peers.cudnn(DECODE, inputs)
    k, _ = variant.arrange(*inputs.pools[0])
    pages = inputs.pools[0][0]
    for token in (0, 17, 69):
        page = inputs.page_table[1, token // DECODE.S]
        assert (k[1, token] == pages[page, :, token % DECODE.S]).all()


@pytest.mark.slow
def test_without_torch_the_rest_still_runs_and_it_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_peers, "_SCRIPT", tmp_path / "torch_peers.py")
    (tmp_path / "torch_peers.py").write_text("import no_such_module_as_torch")
    path = tmp_path / "kernels_peers.json"
    arguments = ["--peers", "--small", "--only=relay 4", "--backend=xla", f"--json={path}"]
    assert kernels.main([*arguments, f"--torch-python={sys.executable}"]) == 0
    found = load(path)
    (row,) = found["rows"]
    assert {"us", "pallas_us", "cudnn_us", "cudnn_once_us"} <= set(row)
    assert {line["peer"] for line in found["did_not_run"]} == {"sdpa", "flex"}
    assert "no_such_module_as_torch" in capsys.readouterr().out
    page = report.render(tmp_path)["attention"]
    assert "| relay 4; 64; 20 |" in page
    assert "- sdpa: torch's process ended with 1: ModuleNotFoundError" in page


def test_lines_that_torch_wrote_before_it_fell_are_kept(tmp_path, monkeypatch):
    line = {"case": RELAY.name, "peer": "sdpa", "variant": "x", "us": 3.0, "error": 0.0}
    (tmp_path / "torch_peers.py").write_text(
        "import json, sys\n"
        "task = json.load(open(sys.argv[1]))\n"
        "assert task['cases'][0]['own'] == [20] * 4\n"
        "out = open(task['out'], 'w')\n"
        f"out.write(json.dumps({{'torch': '2'}}) + '\\n' + {json.dumps(line)!r})\n"
        "sys.exit('out of memory')\n"
    )
    monkeypatch.setattr(run_peers, "_SCRIPT", tmp_path / "torch_peers.py")
    options = kernels.parser().parse_args(["--peers", "--small", "--only=relay 4"])
    version, lines = run_peers.run_torch(options)
    assert version == "2"
    assert lines[0] == line
    assert [(x["peer"], "out of memory" in x["failed"]) for x in lines[1:]] == [("flex", True)]


def test_the_best_variant_of_a_peer_counts():
    lines = [
        {"peer": "p", "variant": name, "us": us, "error": 0.0}
        for name, us in (("a", 3.0), ("b", 2.0), ("c", 4.0))
    ]
    assert run_peers.best_of([*lines, {"peer": "q", "variant": "", "failed": "no"}]) == {
        "p_us": 2.0,
        "p_variant": "b",
        "p_error": 0.0,
    }


def test_no_time_is_said():
    options = kernels.parser().parse_args(["--peers", "--small", "--only=relay 4", "--seconds=0"])
    results = ResultFile(None, {})
    assert run_peers.run_peers(options, results, None, []) == 1
    assert "--seconds" in results.more["did_not_run"][0]["failed"]


def test_the_peers_cases_are_in_the_table():
    options = kernels.parser().parse_args(["--peers"])
    assert len(run_peers.chosen_cases(options)) == len(_PEERS)


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is missing")
def test_torch_gives_the_right_results():
    options = kernels.parser().parse_args(["--peers", "--small", "--seconds=600"])
    version, lines = run_peers.run_torch(options)
    assert version
    timed = {(line["case"], line["peer"]) for line in lines if "us" in line}
    assert timed == {(c.name, p) for c in run_peers.chosen_cases(options) for p in ("sdpa", "flex")}
