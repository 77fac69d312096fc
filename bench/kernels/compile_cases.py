"""Compiles the programs of many cases in parallel, before any is timed."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from bench.ceilings import Ceilings
from bench.kernels.backends import Kernel
from bench.kernels.case_programs import CasePrograms
from bench.kernels.cases.attention import Case
from bench.kernels.program import Program
from bench.kernels.run_case import lower_case

_TELL_SECONDS = 10


def compile_cases(
    cases: Sequence[Case], kernel: Kernel, ceilings: Ceilings, until: float
) -> dict[str, CasePrograms]:
    """Programs by case name, compiled on all cores; no compilation is running on return.

    Programs not started by ``until`` (of ``time.monotonic``) are compiled when their case runs.
    Failures are reported then too.
    """

    def compile_in_time(program: Program) -> None:
        if time.monotonic() < until:
            program.compile()

    found: dict[str, CasePrograms] = {}
    start, pending = time.monotonic(), set()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in cases:
            if time.monotonic() > until:
                break
            try:
                found[case.name] = lower_case(case, kernel, ceilings)
            except Exception:  # reported when the case runs
                continue
            pending |= {pool.submit(compile_in_time, x) for x in found[case.name].programs}
        total = len(pending)
        print(f"lowered {len(found)} cases in {time.monotonic() - start:.0f} s", flush=True)
        while pending:
            _, pending = wait(pending, timeout=_TELL_SECONDS)
            seconds = time.monotonic() - start
            print(
                f"compiled {total - len(pending)} of {total} programs in {seconds:.0f} s",
                flush=True,
            )
    return found
