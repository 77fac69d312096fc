"""The kernels compared with those of JAX and torch; a failure of one does not affect the others."""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.ceilings import Ceilings, measure_ceilings
from bench.kernels.backends import Kernel, choose_kernel
from bench.kernels.cases.attention import Case, make_inputs
from bench.kernels.cases.table import peer_cases
from bench.kernels.peers import jax_peers
from bench.kernels.result_file import ResultFile
from bench.kernels.run_case import distinct_layers, run_case
from bench.kernels.run_table import reason
from rjax.benchmarks.text_tables import markdown

COLUMNS = {
    "case": "case",
    "floor_us": "roofline, us",
    "us": "rjax, us",
    "pallas_us": "Pallas paged_attention",
    "cudnn_us": "cuDNN through JAX",
    "cudnn_once_us": "cuDNN, prefix once + merge",
    "sdpa_us": "torch SDPA",
    "flex_us": "torch FlexAttention",
    "best_over_ours": "best other / rjax",
}
_TORCH_SHARE = 0.5  # of the time
_STARTS = 60  # seconds for torch to start and to finish its last case
_SCRIPT = Path(__file__).parent / "peers" / "torch_peers.py"

type Line = dict[str, Any]


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Cases of the options ``--small`` and ``--only``."""
    return [case for case in peer_cases(small=options.small) if options.only in case.name]


def run_torch(options: argparse.Namespace) -> tuple[str | None, list[Line]]:
    """(version of torch, lines of every case); runs a separate process, so call this before this
    process allocates device memory."""
    cases, seconds = chosen_cases(options), _TORCH_SHARE * options.seconds
    with tempfile.TemporaryDirectory() as scratch:
        task, out = Path(scratch) / "task.json", Path(scratch) / "out.jsonl"
        found = {"cases": [_told(c) for c in cases], "out": str(out), "seconds": seconds}
        task.write_text(json.dumps(found))
        why = _run([options.torch_python, str(_SCRIPT), str(task)], seconds + _STARTS)
        lines = [json.loads(x) for x in out.read_text().splitlines()] if out.exists() else []
    version = lines.pop(0)["torch"] if lines else None
    if why is not None:
        print(why, flush=True)
        ran = {(line["case"], line["peer"]) for line in lines}
        named = [(case, peer) for case in cases for peer in ("sdpa", "flex")]
        lines += [_failure(c, peer, why) for c, peer in named if (c.name, peer) not in ran]
    return version, lines


def _run(command: list[str], seconds: float) -> str | None:
    """Why the process failed, or None."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            check=False,
            stderr=subprocess.PIPE,
            text=True,
            timeout=seconds,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"torch's process: {type(error).__name__} after at most {seconds:g} s"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
    return f"torch's process ended with {done.returncode}: {last}"


def run_peers(
    options: argparse.Namespace,
    results: ResultFile,
    torch_version: str | None,
    torch_lines: list[Line],
) -> int:
    """Run our kernel and the peers in JAX, one row per case; return how many of ours failed."""
    start = time.monotonic()
    kernel, ceilings = choose_kernel(options.backend), measure_ceilings()
    not_run: list[Line] = []
    results.more |= {
        "backend": kernel.name,
        "torch": torch_version,
        "copy_bytes_per_s": ceilings.copy,
        "matmul_flop_per_s": ceilings.matmul,
        "did_not_run": not_run,
    }
    bad = 0
    for case in chosen_cases(options):
        lines = [line for line in torch_lines if line["case"] == case.name]
        row: dict[str, Any] = {"case": case.name}
        if time.monotonic() - start > (1 - _TORCH_SHARE) * options.seconds:
            lines.append(_failure(case, "rjax", f"{options.seconds:g} s were over (--seconds)"))
            bad += 1
        else:
            row["floor_us"] = case.roofline_us(ceilings, kernel.dtype.itemsize)
            ours = _ours(case, kernel, ceilings)
            bad += "failed" in ours
            row["us"] = ours.get("us")
            lines += [ours] * ("failed" in ours) + jax_lines(case, kernel, ceilings)
        for line in lines:
            if "failed" in line:
                not_run.append(line)
                print(f"{case.name:34s} {line['peer']} {line['variant']}: {line['failed']}")
        row |= best_of(lines)
        times = [row[key] for key in row if key.endswith("_us") and key != "floor_us"]
        if times and row.get("us"):
            row["best_over_ours"] = min(times) / row["us"]
        results.add(row)
        shown = {key: f"{value:.4g}" for key, value in row.items() if isinstance(value, float)}
        print(f"{case.name:34s} {shown}", flush=True)
    return bad


def best_of(lines: Sequence[Line]) -> dict[str, Any]:
    """For each peer the time, name and error of its best variant."""
    row: dict[str, Any] = {}
    for line in lines:
        key = f"{line['peer']}_us"
        if "us" in line and line["us"] < row.get(key, float("inf")):
            row[key] = line["us"]
            row[f"{line['peer']}_variant"] = line["variant"]
            row[f"{line['peer']}_error"] = line["error"]
    return row


def jax_lines(case: Case, kernel: Kernel, ceilings: Ceilings) -> list[Line]:
    """A line for each variant of each peer in JAX, with an error for unsupported cases."""
    found: list[Line] = []
    inputs = make_inputs(case, 0, distinct_layers(case), kernel.dtype)
    for peer, variants in jax_peers.PEERS.items():
        named = {"case": case.name, "peer": peer}
        try:
            for variant in variants(case, inputs):
                try:
                    seconds, error = jax_peers.measure(case, inputs, variant, ceilings)
                except Exception as error:
                    found.append(named | {"variant": variant.name, "failed": reason(error)})
                    continue
                found.append(named | {"variant": variant.name, "us": 1e6 * seconds, "error": error})
        except Exception as error:
            found.append(_failure(case, peer, reason(error)))
    return found


def table(found: Mapping[str, Any]) -> str:
    """The rows, and below them the failures with their reasons."""
    rows = found["rows"]
    columns = {k: v for k, v in COLUMNS.items() if any(row.get(k) is not None for row in rows)}
    why: dict[tuple[str, str], list[str]] = {}
    for line in found["did_not_run"]:
        name = " ".join(x for x in (line["peer"], line["variant"]) if x)
        why.setdefault((name, line["failed"]), []).append(line["case"])
    text = [f"- {name}: {said} ({', '.join(cases)})" for (name, said), cases in why.items()]
    return "\n".join([markdown(rows, columns), *(["", "Not run:", "", *text] if text else [])])


def _ours(case: Case, kernel: Kernel, ceilings: Ceilings) -> Line:
    try:
        result = run_case(case, kernel, ceilings)
    except Exception as error:
        return _failure(case, "rjax", reason(error))
    if not result.correct:
        return _failure(case, "rjax", f"wrong result, relative error {result.relative_error:.1e}")
    return {"us": result.us}


def _failure(case: Case, peer: str, why: str) -> Line:
    return {"case": case.name, "peer": peer, "variant": "", "failed": why}


def _told(case: Case) -> dict[str, Any]:
    """A case as JSON for the torch process."""
    numbers = {name: getattr(case, name) for name in ("name", "batch", "shared", "queries")}
    sizes = {name: getattr(case, name) for name in ("prefixes", "N", "K", "H")}
    return numbers | sizes | {"own": case.own_tokens.tolist()}
