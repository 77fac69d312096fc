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
from concurrent.futures import ThreadPoolExecutor
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
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # lower and compile; nothing is timed
        prepared = dict(zip(cases, pool.map(_prepared, cases), strict=True))
    print(f"compiled and checked after {time.monotonic() - start:.0f} s", flush=True)
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "fla_us": fla_us.get(case.name)}
        if time.monotonic() - start > options.seconds:
            print(f"{case.name}: not run, {options.seconds:g} s were over (--seconds)")
            bad += 1
            continue
        try:
            row |= _run(case, prepared[case], ceilings)
        except Exception as error:
            row["failed"] = reason(error)
        bad += "failed" in row
        results.add(row)
        print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return bad


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """The relative error of a case, and its timed programs; or why there are none.

    Attributes:
        chains: of the kernel, and of that without page ends.
    """

    error: float = float("nan")
    chains: tuple[Any, ...] = ()
    failed: Exception | None = None


def _prepared(case: DeltaCase) -> _Prepared:
    on_gpu = jax.default_backend() == "gpu"
    kernel = mosaic.gated_delta if on_gpu else base.gated_delta
    kernels = (kernel, gated_delta_decode) if on_gpu and case.decodes else (kernel,)
    try:
        return _Prepared(_error(case, kernel), tuple(_chain(case, each) for each in kernels))
    except Exception as error:
        return _Prepared(failed=error)


def _run(case: DeltaCase, prepared: _Prepared, ceilings: Ceilings) -> dict[str, Any]:
    if prepared.failed is not None:
        raise prepared.failed
    floor = ceilings.seconds(case.moved, case.flops)
    row: dict[str, Any] = {"floor_us": 1e6 * floor, "relative_error": prepared.error}
    if not prepared.error < _LARGEST_ERROR:
        raise ValueError(f"wrong result, relative error {prepared.error:.1e}")
    for chain, suffix in zip(prepared.chains, ("", "_decode"), strict=False):
        us = 1e6 * _seconds(case, chain)
        row["decode_us" if suffix else "us"] = us
        if case.decodes:
            row["of_copy" + suffix] = 1e6 * case.moved / ceilings.copy / us
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


_CONV = ("conv_ends", "recent")
"""Arrays of `LayerStates` that the gated delta rule leaves alone."""


def _chain(case: DeltaCase, kernel: Any) -> Any:
    """The compiled program of a chain of calls over the layers, one after the other.

    It takes few arrays, so that it runs longer than its dispatch.
    """
    once = jax.jit(kernel)  # lowered once

    @functools.partial(jax.jit, donate_argnums=1)
    def chain(operands: Any, arrays: Any, rows: Any, rest: Any) -> Any:
        out, arrays = None, list(arrays)
        for i in range(case.rounds * case.layers):
            n = i % case.layers
            out, layer = once(*operands[i % len(operands)], LayerStates(**arrays[n], **rest), rows)
            arrays[n] = {name: getattr(layer, name) for name in arrays[n]}
        return out, arrays

    return chain.lower(*jax.eval_shape(lambda: _arguments(case))).compile()


def _arguments(case: DeltaCase) -> tuple[Any, ...]:
    """The arguments of `_chain`; those of a prompt have rows of their own in each layer."""
    keys = jax.random.split(jax.random.key(0), 2 * case.layers)
    sets = 1 if case.decodes else case.layers  # of rows; those of a decode step are few
    draw, draw_layer = jax.jit(case.operands), jax.jit(case.layer)  # compiled once
    operands = [draw(key) for key in keys[:sets]]
    arrays, rest = [], {}
    for key in keys[case.layers :]:
        layer = draw_layer(key)
        of_layer = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
        rest = {name: of_layer.pop(name) for name in _CONV}
        arrays.append(of_layer)
    return operands, arrays, jax.tree.map(jnp.asarray, case.step()), rest


def _seconds(case: DeltaCase, chain: Any) -> float:
    """Seconds of one call."""
    operands, arrays, rows, rest = _arguments(case)
    box = [arrays]
    del arrays

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
