"""The process of an engine of bench.compare_engines: its Python, its task, and why it failed."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.command_line import side_environment
from rjax.cli.one_line import one_line
from rjax.errors import InvalidConfigError

_SIDE = Path(__file__).parent / "engine_side.py"
_NO_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory|RESOURCE_EXHAUSTED"
    r"|Not enough memory|No available memory for the cache blocks"
)
_LOG_LINES = 15  # of an engine that failed
_CHECK = 300.0  # seconds for the import of an engine
_END = 10.0  # seconds that killed processes may take to free the GPU


def check_python(python: str, engine: str) -> str:
    """The absolute path of an interpreter that can import the engine.

    Raises:
        InvalidConfigError: it is no Python, or cannot import the engine.
    """
    found = shutil.which(python)
    if found is None:
        raise InvalidConfigError(f"--python {python}: there is no such program")
    path = str(Path(found).absolute())  # not resolved: a link is the Python of its environment
    answer = _output(path, "print(6 * 7)")
    if answer.stdout.strip() != "42":
        raise InvalidConfigError(f"--python {python}: this is not a Python interpreter")
    answer = _output(path, f"import {engine}")
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["no message"])[-1]
        raise InvalidConfigError(f"--python {python}: it cannot import {engine}: {why}")
    return path


def _output(python: str, code: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [python, "-c", code],
            cwd="/",  # nothing here may hide the engine
            env=side_environment(imports_rjax=False),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_CHECK,
            check=False,
        )
    except OSError as error:
        raise InvalidConfigError(f"--python {python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise InvalidConfigError(f"--python {python}: no answer in {_CHECK:.0f} s") from error


def run_engine(
    python: str, task: Mapping[str, Any], names: Sequence[str], scratch: Path, limit: float
) -> dict[str, Any]:
    """Run the workloads on one engine, in a new process after each that fails.

    Args:
        python: interpreter that has the engine.
        task: of `engine_side`, without the names.
        names: of the workloads.
        scratch: folder for its files.
        limit: seconds that a process may take.

    Returns:
        The answer of `engine_side`. A workload that failed has only "failed", the reason.
    """
    rows: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    left = list(names)
    while left:
        found, reason = _run_process(python, {**task, "names": left}, scratch, limit)
        rows |= found.pop("workloads", {})
        left = [name for name in left if name not in rows]
        if left and not found.get("ready"):  # the next process would not start either
            rows |= {name: {"failed": reason} for name in left}
            left = []
        elif left:
            rows[left.pop(0)] = {"failed": reason}
        facts |= {name: found[name] for name in ("versions", "ready_s") if name in found}
    return facts | {"workloads": rows}


def _run_process(
    python: str, task: dict[str, Any], scratch: Path, limit: float
) -> tuple[dict[str, Any], str]:
    """One process; its answer as far as it came, and why it ended."""
    engine = task["engine"]
    answer, log = scratch / f"{engine}_answer.json", scratch / f"{engine}.log"
    path = scratch / f"{engine}_task.json"
    path.write_text(json.dumps({**task, "answer": str(answer)}))
    answer.unlink(missing_ok=True)
    # A copy outside of bench, whose modules would hide the engine's own of the same names.
    side = shutil.copy(_SIDE, scratch)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [python, str(side), str(path)],
            cwd=scratch,
            env=side_environment(imports_rjax=engine == "rjax"),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
    found = json.loads(answer.read_text()) if answer.exists() else {}
    text = log.read_text(errors="replace").strip().splitlines()
    if set(task["names"]) - set(found.get("workloads", {})):
        print(*text[-_LOG_LINES:], sep="\n", file=sys.stderr)
    return found, _reason(found.get("failed"), status, limit, text)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which hold the GPU's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.1)


def _reason(failed: str | None, status: int | None, limit: float, log: list[str]) -> str:
    """Why a process ended before its last workload, in one line."""
    if status is None:
        return f"ended after {limit:.0f} s"
    memory = [line for line in [*log, failed or ""] if _NO_MEMORY.search(line)]
    if memory:
        return one_line(f"out of memory: {memory[-1].strip()}")
    if failed is not None:
        return one_line(failed)
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return one_line(f"it ended with {how}" + (f": {log[-1].strip()}" if log else ""))
