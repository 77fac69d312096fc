"""The kernels' benchmark at a size for a CPU: every row is checked, saved and drawn."""

import dataclasses
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import report
from bench.ceilings import Ceilings
from bench.kernels import __main__ as kernels
from bench.kernels import (
    cost_model,
    run_delta,
    run_experts,
    run_peers,
    run_products,
    run_table,
    sweep,
)
from bench.kernels.backends import Kernel, choose_kernel
from bench.kernels.cases.attention import Case, Target, make_inputs
from bench.kernels.cases.table import small_cases, table_cases
from bench.kernels.compile_cases import compile_cases
from bench.kernels.pool_runner import PoolRunner
from bench.kernels.result_file import ResultFile
from bench.kernels.run_case import lower_case, run_case
from bench.kernels.sanitize import __main__ as sanitize
from rjax.benchmarks.records import load

pytestmark = pytest.mark.usefixtures("quickly_compiled_random_numbers")


@pytest.fixture(autouse=True)
def _ceilings(monkeypatch):
    """Measuring them takes seconds."""
    for module in (run_delta, run_experts, run_products, run_table, sweep, run_peers):
        monkeypatch.setattr(module, "measure_ceilings", lambda: Ceilings(copy=4e9, matmul=1e12))


@pytest.mark.slow
def test_the_table_runs_and_is_shown(tmp_path):
    path = tmp_path / "kernels.json"
    assert kernels.main(["--small", "--backend=xla", f"--json={path}"]) == 0
    rows = load(path)["rows"]
    assert [row["case"] for row in rows] == [case.name for case in small_cases()]
    # Times are slopes, which on a busy machine may come out below 0.
    assert all(row["relative_error"] < 1e-5 and math.isfinite(row["us"]) for row in rows)
    relay = next(row for row in rows if row["case"].startswith("relay 4"))
    assert relay["target_us"] == pytest.approx(1.35 * relay["floor_us"] + 5)
    assert "| decode 3 x 70, fp8 |" in report.render(tmp_path)["attention"]
    assert "torch_python" not in path.read_text()


@pytest.mark.slow
def test_products_are_checked_and_shown(tmp_path):
    path = tmp_path / "kernels_products.json"
    assert kernels.main(["--products", "--small", "--only=gate-up,int", f"--json={path}"]) == 0
    rows = load(path)["rows"]
    schemes = ("int8, 8", "int4, 8", "int4 interleaved, 8")
    assert [row["case"] for row in rows] == [f"small gate-up, {each} rows" for each in schemes]
    assert all(row["relative_error"] < 1e-5 and math.isfinite(row["of_copy"]) for row in rows)
    assert "| small gate-up, int8, 8 rows |" in report.render(tmp_path)["gemm"]


@pytest.mark.slow
def test_experts_are_checked_and_shown(tmp_path):
    path = tmp_path / "kernels_experts.json"
    assert kernels.main(["--experts", "--small", f"--json={path}"]) == 0
    rows = load(path)["rows"]
    assert [row["case"] for row in rows] == ["small, 1 rows", "small, 24 rows"]
    assert all(math.isfinite(row["plain_us"] + row["ragged_dot_us"]) for row in rows)
    assert "| small, 24 rows |" in report.render(tmp_path)["experts"]


@pytest.mark.thorough
def test_the_gated_delta_rule_is_checked_and_shown(tmp_path):
    path = tmp_path / "kernels_delta.json"
    assert kernels.main(["--delta", "--small", f"--json={path}"]) == 0
    rows = load(path)["rows"]
    assert [row["case"] for row in rows] == ["decode, 3 sequences", "prefill, 2 x 100 tokens"]
    assert all(row["relative_error"] < 1e-5 and math.isfinite(row["us"]) for row in rows)
    assert math.isfinite(rows[0]["of_copy"])
    assert "| prefill, 2 x 100 tokens |" in report.render(tmp_path)["attention"]


def test_a_wrong_gated_delta_rule_is_said(monkeypatch):
    right, calls = run_delta.base.gated_delta, []

    def wrong(q, k, v, decay, beta, layer, rows):
        """The reference fills the tails and computes the step first; the third one is checked."""
        out, layer = right(q, k, v, decay, beta, layer, rows)
        calls.append(len(q))
        return (out if len(calls) < 3 else 1.02 * out), layer

    monkeypatch.setattr(run_delta.base, "gated_delta", wrong)
    results = ResultFile(None, {})
    options = kernels.parser().parse_args(["--delta", "--small", "--only=decode"])
    assert run_delta.run_delta(options, results) == 1
    assert "wrong result, relative error 2" in results.rows[0]["failed"]


@pytest.mark.thorough
def test_wrong_and_failing_cases_are_said_in_order_and_cost_no_other(monkeypatch, capsys):
    right = choose_kernel("xla")

    def broken(q, k, v, *args, **options):
        if "sinks" in options:
            raise RuntimeError("no sinks here")
        if "k_scales" in options:  # lowers, and does not compile
            q = jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(q.shape, q.dtype))(q)
        if q.shape[0] == 4:
            return right.attention(q, k, v, *args, **options)
        T, N, _ = q.shape
        return q, jnp.zeros((T, N), jnp.float32)

    kernel = dataclasses.replace(right, attention=broken)
    monkeypatch.setattr(run_table, "choose_kernel", lambda name: kernel)
    results = ResultFile(None, {})
    assert run_table.run_table(kernels.parser().parse_args(["--small"]), results) == 4
    assert [row["case"] for row in results.rows] == [case.name for case in small_cases()]
    wrong, relay, groups, prompt, fp8, options = (row.get("failed") for row in results.rows)
    assert (wrong, relay, groups, prompt) == ("wrong result", None, None, "wrong result")
    assert fp8 is not None and "no_such_target" in fp8
    assert options == "RuntimeError: no sinks here"
    assert "no sinks here" in capsys.readouterr().out


def test_nothing_is_compiled_once_the_first_case_runs(monkeypatch):
    compiled, at_first = [], []
    compile_one, run_case = jax.stages.Lowered.compile, run_table.run_case

    def counted(lowered, *args):
        compiled.append(lowered)
        return compile_one(lowered, *args)

    def run(*args):
        at_first.append(len(compiled))
        return run_case(*args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    monkeypatch.setattr(run_table, "run_case", run)
    options = kernels.parser().parse_args(["--small", "--only=relay", "--backend=xla"])
    assert run_table.run_table(options, ResultFile(None, {})) == 0
    assert at_first == [8, 8]  # four programs a case
    assert len(compiled) == 8


def test_what_there_was_no_time_to_compile_ahead_compiles_when_it_runs():
    case, kernel, ceilings = small_cases()[1], choose_kernel("xla"), Ceilings(4e9, 1e12)
    assert compile_cases([case], kernel, ceilings, until=time.monotonic() - 1) == {}
    result = run_case(case, kernel, ceilings, lower_case(case, kernel, ceilings))
    assert result.correct


def test_every_case_of_the_table_is_one_of_its_kind():
    cases = table_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for at, case in enumerate(cases):
        if case.target is not None and case.target.of is not None:
            assert case.target.of in names[:at]
    # The rooflines of the relay cases on an H200, and their targets.
    by_name = dict(zip(names, cases, strict=True))
    h200 = Ceilings(copy=4.3e12, matmul=7.9e14)
    for name, wanted in (("64; 2048; 256", 29), ("64; 8192; 256", 37), ("256; 2048; 256", 91)):
        case = by_name[f"relay {name}"]
        assert case.target is not None
        assert case.target.at(case.roofline_us(h200), {}) == pytest.approx(wanted, rel=0.05)


def test_a_target_may_be_another_case():
    target = Target(factor=1 / 1.7, of="a")
    assert target.at(10.0, {}) is None
    assert target.at(10.0, {"a": 170.0}) == pytest.approx(100)
    assert Target(12).at(10.0, {}) == 12


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({}, 64 + 4 * 20),
        ({"share": "off"}, 4 * 84),
        ({"window": 30}, 10 + 4 * 20),
        ({"window": 7}, 4 * 7),
        ({"window": 30, "share": "off"}, 4 * 30),
        ({"prefixes": 2}, 2 * 64 + 4 * 20),
    ],
)
def test_the_roofline_counts_visible_tokens_once(change, tokens):
    case = dataclasses.replace(Case("", 4, 64, 20, N=4, K=2, H=16, S=16), **change)
    assert case.bytes(2) == 2 * 2 * 16 * 2 * tokens + 2 * 4 * 4 * 16 * 2
    fp8 = dataclasses.replace(case, fp8=True)
    assert fp8.bytes(2) == 2 * 2 * 16 * tokens + 2 * 4 * 4 * 16 * 2
    seen = 4 * min(84, case.window or 84)
    assert case.flops() == 4 * 4 * 16 * seen


def test_unused_places_hold_nan_also_in_fp8():
    case = dataclasses.replace(small_cases()[0], fp8=True)
    k, _ = make_inputs(case, 0, 1).pools[0]
    live = ~np.isnan(np.asarray(k, np.float32)).any(axis=(1, 3))
    assert live.sum() == 3 * 70


@pytest.mark.slow
def test_the_sweep_runs_and_is_drawn(tmp_path):
    path = tmp_path / "kernels_sweep.json"
    assert kernels.main(["--sweep", "--small", "--backend=xla", f"--json={path}"]) == 0
    rows = load(path)["rows"]
    assert len(rows) == len(sweep.small_points())
    assert all(row["error"] < 1e-5 for row in rows)
    assert all(row["speedup"] == pytest.approx(row["plain_us"] / row["relay_us"]) for row in rows)
    assert (tmp_path / "kernels_sweep.png").exists()
    report.draw_all(tmp_path)
    assert (tmp_path / "kernels_sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "kernels_sweep.png" in report.render(tmp_path)["attention"]


@pytest.mark.parametrize("arguments", [["--sweep", "--only=x"], ["--png=x.png"]])
def test_options_that_would_do_nothing_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        kernels.main(arguments)
    assert "--sweep" in capsys.readouterr().err


def test_a_point_that_fails_or_is_wrong_costs_no_other(monkeypatch, capsys):
    def measure(self, case):
        if case.batch == 1:
            raise MemoryError("too much")
        error = 0.5 if case.shared == 128 and case.share == "on" else 0.0
        return 2e-6 if case.share == "off" else 1e-6, error, None

    monkeypatch.setattr(PoolRunner, "measure", measure)
    options = kernels.parser().parse_args(["--sweep", "--small", "--backend=xla"])
    results = ResultFile(None, {})
    assert sweep.run_sweep(options, results) == 4
    failed = [row["failed"] for row in results.rows if "failed" in row]
    assert failed == ["MemoryError: too much"] * 3 + ["wrong result"]
    assert {row["speedup"] for row in results.rows if "speedup" in row} == {2.0}
    assert "too much" in capsys.readouterr().out


def test_what_no_time_was_left_for_is_said(capsys):
    arguments = ["--small", "--backend=xla", "--seconds=0"]
    assert kernels.main(["--sweep", *arguments]) == 1
    assert f"{len(sweep.small_points())} points not run" in capsys.readouterr().out
    assert kernels.main(arguments) == 1
    assert capsys.readouterr().out.count("not run: 0 s were over") == len(small_cases())


def test_the_sweep_covers_what_it_says():
    found = sweep.points()
    assert 60 <= len(found) <= 100
    assert len(set(found)) == len(found)
    assert {p.batch for p in found} >= {1, 512}
    assert {p.prefix for p in found} >= {0, 131072}
    assert {p.N // p.K for p in found} == {1, 4, 16}
    kernel = Kernel("mosaic", print, print, jnp.dtype(jnp.bfloat16))
    for point in found:
        for share in (True, False):
            case = point.case(kernel, share=share)
            assert case.split % case.S == 0
            assert not share or point.batch == 1 or point.prefix % case.split == 0


@pytest.mark.slow
def test_the_sanitizer_runs_a_batch_that_is_right(monkeypatch, capsys, tmp_path):
    assert sanitize.main(["--bare", "--backend=xla", "--only=attention"]) == 0
    assert capsys.readouterr().out.count("relative error") == 3
    with pytest.raises(SystemExit):
        sanitize.main(["--bare", "--backend=xla", "--only=other"])
    assert "no case contains 'other'" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "sanitizer", lambda: None)
    assert sanitize.main(["--backend=xla"]) == 3
    assert "CUDA toolkit" in capsys.readouterr().err
    # One that only tells what it was asked, and crashes in one case.
    program, told = tmp_path / "sanitizer", tmp_path / "told"
    program.write_text(
        f'#!/bin/sh\necho "$XLA_PYTHON_CLIENT_ALLOCATOR $(nproc) $@" >> {told}\n'
        'case "$*" in *prompt) kill -SEGV $$;; *fp8) exit 1;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "sanitizer", lambda: str(program))
    assert sanitize.main(["--backend=xla", "--tool=synccheck", "--only=attention"]) == 1
    commands = told.read_text().splitlines()
    assert [command.rsplit("=", 1)[1] for command in commands] == [
        "attention-relay",
        "attention-prompt",
        "attention-fp8",
    ]
    assert commands[0].startswith("platform 1 --tool synccheck --error-exitcode 1 ")
    assert "bench.kernels.sanitize --bare --backend=xla --only=" in commands[0]
    found = capsys.readouterr()
    assert found.out == "synccheck: 1 of 3 cases without a finding\n"
    assert found.err.splitlines() == [
        "attention-prompt: the sanitizer ended by signal 11",
        "attention-fp8: exit status 1",
    ]
    assert sanitize.main(["--backend=xla", "--only=one-row"]) == 0
    assert capsys.readouterr().out == "memcheck: 1 of 1 cases without a finding\n"
    program.write_text("#!/bin/sh\nexec sleep 10\n")
    monkeypatch.setattr(sanitize, "_SECONDS", 0.1)
    assert sanitize.main(["--backend=xla", "--only=one-row"]) == 1
    assert "one-row: not done after 0.1 s" in capsys.readouterr().err


@pytest.mark.parametrize("module", [kernels, cost_model, sanitize])
def test_help_shows_commands(module):
    made = module.parser()
    assert made.description.count("    " + made.prog) >= 2
    assert all(action.help for action in made._actions)


def test_plans_of_one_batch_size_share_a_program():
    """For any prefix and KV split size, shapes and static parts are equal."""
    kernel = dataclasses.replace(choose_kernel("xla"), name="mosaic")
    found = [p for p in sweep.small_points() if p.batch == 4 and p.K == 2]
    cases = [
        dataclasses.replace(p.case(kernel, share=share), tile_rows=16, split=split)
        for p in found
        for share, split in ((True, 64), (False, 128))
    ]
    runner = PoolRunner(kernel, cases)
    plans = [runner._plan(c, runner._tables(c)[0]) for c in cases]
    assert len({jax.tree.structure(plan) for plan in plans}) == 1
    assert len({tuple(leaf.shape for leaf in jax.tree.leaves(plan)) for plan in plans}) == 1
    assert len({json.dumps(int(plan.lists[1].num_items)) for plan in plans}) > 1
