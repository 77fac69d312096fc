"""The kernel table: every case is checked, then timed and compared with its roofline and target."""

import argparse
import dataclasses
import time
from typing import Any

from bench.ceilings import measure_ceilings
from bench.kernels.backends import choose_kernel
from bench.kernels.cases.table import small_cases, table_cases
from bench.kernels.compile_cases import compile_cases
from bench.kernels.result_file import ResultFile
from bench.kernels.run_case import Result, run_case

COLUMNS = {
    "case": "case",
    "variant": "KV split",
    "us": "us",
    "sustained_us": "sustained, us",
    "floor_us": "roofline, us",
    "ratio": "time / roofline",
    "target_us": "target, us",
    "relative_error": "relative error",
    "failed": "error",
}
_COMPILING = 0.6  # largest fraction of the time before the first case is timed


def run_table(options: argparse.Namespace, results: ResultFile) -> int:
    """Run the cases selected by ``options.only``; return how many failed or were wrong.

    Programs are compiled before the first case runs: compiling takes most of the time, uses all
    cores, and tries kernels on the device, which would disturb the timing.
    """
    start = time.monotonic()
    kernel, ceilings = choose_kernel(options.backend), measure_ceilings()
    results.more |= {
        "backend": kernel.name,
        "copy_bytes_per_s": ceilings.copy,
        "matmul_flop_per_s": ceilings.matmul,
    }
    print(
        f"{kernel.name}: copy {ceilings.copy / 1e12:.3g} TB/s, "
        f"bf16 matmul {ceilings.matmul / 1e12:.3g} TFLOP/s"
    )
    every = small_cases() if options.small else table_cases()
    cases = [case for case in every if options.only in case.name]
    ready = compile_cases(cases, kernel, ceilings, start + _COMPILING * options.seconds)
    print(
        f"{'case':34s} {'KV split':26s} {'us':>9s} {'sustained':>9s} {'roofline':>9s} "
        f"{'ratio':>6s} {'target':>8s}"
    )
    took: dict[str, float] = {}
    bad = 0
    for case in cases:
        if time.monotonic() - start > options.seconds:
            print(f"{case.name:34s} not run: {options.seconds:g} s were over (--seconds)")
            bad += 1
            continue
        try:
            result = run_case(case, kernel, ceilings, ready.pop(case.name, None))
        except Exception as error:  # a failed case must not stop the others
            bad += 1
            results.add({"case": case.name, "failed": reason(error)})
            print(f"{case.name:34s} did not run: {reason(error)}", flush=True)
            continue
        if case.target is not None:
            target = case.target.at(result.floor_us, took)
            result = dataclasses.replace(result, target_us=target)
        if result.correct:
            took[case.name] = result.us
        bad += not result.correct
        print(result.line(), flush=True)
        results.add(row(result))
    return bad


def row(result: Result) -> dict[str, Any]:
    """The row of a result; a wrong result has an error instead of a time."""
    found: dict[str, Any] = dataclasses.asdict(result)
    found["ratio"] = result.us / result.floor_us
    if not result.correct:
        found |= {"us": None, "sustained_us": None, "ratio": None, "failed": "wrong result"}
    return found


def reason(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]
