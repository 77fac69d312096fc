"""Runs the kernels of small batches under NVIDIA's compute-sanitizer.

    python -m bench.kernels.sanitize                       # reads and writes out of bounds
    python -m bench.kernels.sanitize --tool racecheck --only few-rows-fp8
    python -m bench.kernels.sanitize --tool synccheck --backend triton --only attention

Attention to prefixes, to unique tokens of every length up to a few pages, and of a prompt chunk;
then decode steps of one row and of few rows (``steps``). Each result is checked. Each case
has a process of its own, on one core: with several the tool itself crashes in most steps. The
sanitizer is part of the CUDA toolkit; the exit status is 3 if it is missing.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
import time

import jax

from bench.kernels.backends import NAMES, Kernel, choose_kernel
from bench.kernels.cases.attention import Case, make_inputs
from bench.kernels.cases.sanitizer import attention_cases, step_cases
from bench.kernels.check import errors
from bench.kernels.sanitize.steps import check_step
from rjax.cli.parser import OneLineParser

_MISSING = 3
_PLACES = ("/usr/local/cuda*/bin/compute-sanitizer", "/opt/nvidia/**/compute-sanitizer")
_SECONDS = 300  # of one case


def check_attention(case: Case, kernel: Kernel) -> bool:
    """Whether the attention is right; prints a line."""
    start = time.perf_counter()
    inputs = make_inputs(case, 0, 1, kernel.dtype)
    attend = jax.jit(kernel.attention, static_argnames="spec")
    prepare = jax.jit(kernel.prepare, static_argnums=2)
    plan = prepare(inputs.plan, inputs.positions, (case.N, case.K, case.H))
    out, lse = attend(*inputs.arguments, plan, spec=case.spec, **inputs.options)
    error, _ = errors(case, inputs, out, lse, case.spec, rows=4)
    print(
        f"{case.name}: relative error {error:.1e}, {time.perf_counter() - start:.1f} s", flush=True
    )
    return error < 1e-2


def chosen(only: str) -> list[str]:
    """The case of this name, or else those whose name contains it."""
    names = [case.name for case in (*attention_cases(1), *step_cases())]
    return [only] if only in names else [name for name in names if only in name]


def check(kernel: Kernel, names: list[str]) -> bool:
    """Whether each of these cases is right."""
    attention = [case for case in attention_cases(kernel.tile_rows(4)) if case.name in names]
    steps = [case for case in step_cases() if case.name in names]
    right = [check_attention(case, kernel) for case in attention]
    return all(right + [check_step(case, kernel.name) for case in steps])


def sanitizer() -> str | None:
    """Path of the sanitizer, or None."""
    found = shutil.which("compute-sanitizer")
    return found or next((p for place in _PLACES for p in glob.glob(place, recursive=True)), None)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = OneLineParser(
        prog="python -m bench.kernels.sanitize",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tools = ("memcheck", "racecheck", "synccheck", "initcheck")
    p.add_argument("--tool", default="memcheck", choices=tools, help="of the sanitizer")
    p.add_argument("--backend", default="auto", choices=("auto", *NAMES), help="of the kernels")
    p.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help="the case of this name, or all whose name contains it",
    )
    p.add_argument("--bare", action="store_true", help="run the cases here, without the sanitizer")
    return p


def main(arguments: list[str] | None = None) -> int:
    """Return 0 without findings, 3 without a sanitizer."""
    p = parser()
    options = p.parse_args(arguments)
    names = chosen(options.only)
    if not names:
        p.error(f"--only: the name of no case contains {options.only!r}")
    if options.bare:
        return 0 if check(choose_kernel(options.backend), names) else 1
    program = sanitizer()
    if program is None:
        print(
            "no compute-sanitizer on this machine; it comes with the CUDA toolkit (looked in PATH, "
            f"{', '.join(_PLACES)})",
            file=sys.stderr,
        )
        return _MISSING
    command = [program, "--tool", options.tool, "--error-exitcode", "1", sys.executable]
    command += ["-m", "bench.kernels.sanitize", "--bare", f"--backend={options.backend}"]
    failed = []
    for name in names:
        if status := _run([*command, f"--only={name}"]):
            print(f"{name}: {status}", file=sys.stderr)
            failed.append(name)
    print(f"{options.tool}: {len(names) - len(failed)} of {len(names)} cases without a finding")
    return 1 if failed else 0


def _run(command: list[str]) -> str | None:
    """How one case failed, or None."""
    flags = [
        os.environ.get("XLA_FLAGS", ""),
        # Otherwise XLA autotunes the GEMMs of the reference, slowly under the sanitizer.
        "--xla_gpu_autotune_level=0",
        "--xla_gpu_force_compilation_parallelism=1",
    ]
    environment = os.environ | {
        # A separate allocation for each array, so that reads beyond its end are found.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_FLAGS": " ".join(flags).strip(),
    }
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # the process inherits it
    try:
        status = subprocess.run(command, env=environment, timeout=_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"not done after {_SECONDS} s"
    finally:
        os.sched_setaffinity(0, cores)
    if status < 0:
        return f"the sanitizer ended by signal {-status}"
    return f"exit status {status}" if status else None


if __name__ == "__main__":
    sys.exit(main())
