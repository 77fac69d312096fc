"""The gated delta rule of a layer: checked against float32, then timed beside other kernels.

Each time is of a whole call, on states that are not in the L2 cache. A decode step reads each state
and writes none, and computes those at the ends of pages. The kernels of flash-linear-attention
(fla) run where torch and fla-core are installed; theirs write a state for each sequence.
"""

import argparse
import dataclasses
import functools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.ceilings import Ceilings, measure_ceilings
from bench.kernels.cases.delta import DeltaCase, delta_cases
from bench.kernels.result_file import ResultFile
from bench.kernels.run_table import reason
from bench.kernels.timing import burst_seconds
from rjax.pallas_kernels.gated_delta import base, mosaic
from rjax.pallas_kernels.gated_delta.decode import gated_delta_decode
from rjax.pallas_kernels.gated_delta.states import LayerStates

COLUMNS = {
    "case": "case",
    "floor_us": "roofline, us",
    "us": "rjax, us",
    "decode_us": "rjax without page ends, us",
    "of_copy": "of the copy rate",
    "of_copy_decode": "without page ends",
    "fla_us": "fla, us",
    "relative_error": "relative error",
}
_LARGEST_ERROR = 1e-2  # of outputs and states
_SCRIPT = Path(__file__).parent / "peers" / "torch_delta.py"


def run_delta(options: argparse.Namespace, results: ResultFile) -> int:
    """Run the cases whose name contains ``options.only``; return how many of ours failed."""
    cases = [case for case in delta_cases(small=options.small) if options.only in case.name]
    start = time.monotonic()
    version, fla_us = _fla(cases, options.torch_python, options.seconds / 2)
    ceilings = measure_ceilings()
    results.more |= {
        "fla": version,
        "copy_bytes_per_s": ceilings.copy,
        "matmul_flop_per_s": ceilings.matmul,
    }
    bad = 0
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "fla_us": fla_us.get(case.name)}
        if time.monotonic() - start > options.seconds:
            print(f"{case.name}: not run, {options.seconds:g} s were over (--seconds)")
            bad += 1
            continue
        try:
            row |= _run(case, ceilings)
        except Exception as error:
            row["failed"] = reason(error)
        bad += "failed" in row
        results.add(row)
        print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return bad


def _run(case: DeltaCase, ceilings: Ceilings) -> dict[str, Any]:
    floor = ceilings.seconds(case.moved, case.flops)
    row: dict[str, Any] = {"floor_us": 1e6 * floor}
    kernel = mosaic.gated_delta if jax.default_backend() == "gpu" else base.gated_delta
    row["relative_error"] = _error(case, kernel)
    print(f"{case.name}: relative error {row['relative_error']:.2g}", flush=True)
    if not row["relative_error"] < _LARGEST_ERROR:
        raise ValueError(f"wrong result, relative error {row['relative_error']:.1e}")
    row["us"] = 1e6 * _seconds(case, kernel)
    if not case.decodes:
        return row
    row["of_copy"] = 1e6 * case.moved / ceilings.copy / row["us"]
    if kernel is mosaic.gated_delta:
        row["decode_us"] = 1e6 * _seconds(case, gated_delta_decode)
        row["of_copy_decode"] = 1e6 * case.moved / ceilings.copy / row["decode_us"]
    return row


def _error(case: DeltaCase, kernel: Any) -> float:
    """The larger relative error of outputs and states."""
    keys = jax.random.split(jax.random.key(1), 3)
    layer, reference = case.layer(keys[1]), jax.jit(base.gated_delta)
    with jax.default_matmul_precision("highest"):
        if case.decodes and case.offsets().any():
            before = case.operands(keys[2], int(case.offsets().sum()))
            _, layer = reference(*before, layer, jax.tree.map(jnp.asarray, case.tail_step()))
        given = *case.operands(keys[0]), layer, jax.tree.map(jnp.asarray, case.step())
        want, states = reference(*given)
    got, found = jax.jit(kernel)(*given)
    pairs = ((got, want), (found.states, states.states))
    arrays = [[np.asarray(x, np.float32) for x in pair] for pair in pairs]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in arrays)


def _seconds(case: DeltaCase, kernel: Any) -> float:
    """Seconds of one call in a chain of calls over the layers.

    The program takes few arrays, so that it runs longer than its dispatch.
    """
    keys = jax.random.split(jax.random.key(0), 2 * case.layers)
    sets = 1 if case.decodes else case.layers  # of rows; those of a decode step are few
    operands = [jax.jit(case.operands)(key) for key in keys[:sets]]
    layers = [jax.jit(case.layer)(key) for key in keys[case.layers :]]
    rest = {name: getattr(layers[0], name) for name in ("conv_ends", "recent")}
    once = jax.jit(kernel)  # lowered once

    @functools.partial(jax.jit, donate_argnums=1)
    def chain(operands: Any, arrays: Any, rows: Any, rest: Any) -> Any:  # one after the other
        out, arrays = None, list(arrays)
        for i in range(case.rounds * case.layers):
            n = i % case.layers
            out, layer = once(*operands[i % sets], LayerStates(**arrays[n], **rest), rows)
            arrays[n] = {name: getattr(layer, name) for name in arrays[n]}
        return out, arrays

    names = [field.name for field in dataclasses.fields(layers[0]) if field.name not in rest]
    box = [[{name: getattr(layer, name) for name in names} for layer in layers]]
    rows = jax.tree.map(jnp.asarray, case.step())
    del layers

    def run() -> Any:
        out, box[0] = chain(operands, box[0], rows, rest)
        return out

    return burst_seconds(run) / (case.rounds * case.layers)


def _fla(
    cases: list[DeltaCase], python: str, seconds: float
) -> tuple[str | None, dict[str, float]]:
    """(version of fla-core, times) from a process of its own, before this one takes memory."""
    if jax.default_backend() != "gpu":
        return None, {}
    with tempfile.TemporaryDirectory() as scratch:
        task, told = Path(scratch) / "task.json", Path(scratch) / "told.jsonl"
        shapes = [
            (c.name, c.seqs, c.tokens, c.key_heads, c.key_heads * c.values_a_key, c.dim, c.layers)
            for c in cases
        ]
        task.write_text(json.dumps(shapes))
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [python, str(_SCRIPT), str(task)]
        with told.open("w") as out:
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    stdout=out,
                    stderr=subprocess.PIPE,
                    text=True,
                    check=False,
                    timeout=seconds,
                )
                if done.returncode:
                    said = (done.stderr.strip().splitlines() or ["no message"])[-1][:200]
                    print(f"fla's process ended with {done.returncode}: {said}", flush=True)
            except (OSError, subprocess.TimeoutExpired) as error:
                print(f"fla's process: {type(error).__name__}", flush=True)
        lines = [json.loads(line) for line in told.read_text().splitlines()]
    version, found = (lines.pop(0) if lines else None), {}
    for name, us, failed in lines:
        print(f"{name}: fla: {failed or f'{us:.4g} us'}", flush=True)
        if not failed:
            found[name] = us
    return version, found
