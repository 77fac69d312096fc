"""Compile processes make the programs of their engine, and the engine goes on without them."""

import collections
import importlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import pytest

from rjax.errors import InvalidConfigError
from rjax.sampling import SamplingParams
from rjax.worker.programs import compile_process
from rjax.worker.programs.source import ProgramSource
from tests.kept_programs import kept_programs

from .tiny import make_engine, run

REQUESTS = [("a", [1, 2], SamplingParams(temperature=0, max_tokens=4))]
FEW = {"max_num_seqs": 1, "max_num_batched_tokens": 8, "warmup": "background"}


@pytest.fixture
def cache(tmp_path):
    """An empty cache of compiled programs."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with kept_programs():
        yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def children(monkeypatch):
    """The compile processes that are started."""
    found: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setattr(compile_process.subprocess, "Popen", Popen)
    return found


def wait_until_compiled(engine) -> None:
    while (progress := engine.compile_progress()).compiled < progress.total:
        time.sleep(0.02)


def source_of(engine: Any) -> ProgramSource:
    return engine._worker._start_lanes.args[0].__self__


def test_a_source_makes_the_engines_programs_or_none(tiny, cache):
    engine: Any = make_engine(tiny, compile_processes=1)
    data = source_of(engine).dumps()
    assert ProgramSource.loads(data) == source_of(engine)
    ProgramSource.loads(data).programs()
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(InvalidConfigError, match="differs in"),
    ):
        ProgramSource.loads(data).programs()
    for none in ({"compile_processes": 0}, {}):  # "auto" on a CPU
        engine = make_engine(tiny, **none)
        assert engine._worker._start_lanes is None


@pytest.mark.thorough
def test_a_process_compiles_and_ends(tiny, cache, children):
    compiled = collections.Counter[str]()

    def listen(event: str, duration_secs: float, **labels: str | int) -> None:
        del duration_secs
        compiled[str(labels.get("fun_name"))] += event.endswith("backend_compile_duration")

    # It adds a state to JAX, which the process has not.
    importlib.import_module("jax._src.pallas.fuser.jaxpr_fusion")
    expected = run(make_engine(tiny), REQUESTS)
    for file in (cache / "programs").iterdir():
        file.unlink()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        engine = make_engine(tiny, compile_processes=1, **FEW)
        wait_until_compiled(engine)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not {name for name in compiled if "step" in name or "sample" in name}
    assert run(engine, REQUESTS)["a"].outputs == expected["a"].outputs
    engine.close()
    [child] = children
    child.wait(60)


@pytest.mark.slow
def test_a_killed_process_leaves_its_programs_to_the_engine(tiny, cache, children, caplog):
    engine = make_engine(tiny, compile_processes=1, **FEW)
    while not children:
        time.sleep(0.01)
    children[0].kill()
    wait_until_compiled(engine)
    assert "ended with status -9" in caplog.text
    assert run(engine, REQUESTS)["a"].outputs[0].token_ids
    engine.close()


_ENGINE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from tiny import make_engine
from rjax.worker.programs import compile_process
start = compile_process.subprocess.Popen
def popen(*args, **options):
    child = start(*args, **options)
    print(child.pid, flush=True)
    return child
compile_process.subprocess.Popen = popen
options = {few} | {{"compilation_cache_dir": {cache!r}, "compile_processes": 1}}
engine = make_engine(Path({folder!r}), **options)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "return"])
def test_it_ends_with_the_engine(tiny, tmp_path, end):
    """Killed, or a script that ends without closing the engine."""
    script = _ENGINE.format(
        tests=str(pathlib.Path(__file__).parent),
        folder=str(tiny),
        cache=str(tmp_path / "cache"),
        few=FEW,
        then="time.sleep(600)" if end == "kill" else "time.sleep(1)",
    )
    quickly = {name: os.environ[name] for name in os.environ if name.startswith(("JAX_", "XLA_"))}
    root = str(pathlib.Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=quickly | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
    ) as engine:
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        if end == "kill":
            engine.send_signal(signal.SIGKILL)
        engine.wait(60)
    limit = time.monotonic() + 60
    while _runs(child):
        assert time.monotonic() < limit
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
