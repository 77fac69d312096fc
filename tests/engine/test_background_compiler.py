"""Threads and processes that compile: the order, errors, interrupts, and the end."""

import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rjax.batch.compile_progress import COMPILE_THREAD
from rjax.worker.programs import background_compiler
from rjax.worker.programs.background_compiler import BackgroundCompiler, CompileTask
from rjax.worker.programs.compile_process import CompileLane, CompileProcessEndedError


@pytest.fixture(autouse=True)
def _threads_end(monkeypatch):
    """A thread that compiles uses Python's random numbers, which other tests watch."""
    monkeypatch.setattr(background_compiler, "_LINGER_SECONDS", 0.3)
    monkeypatch.setattr(background_compiler, "_LOOK_SECONDS", 0.01)
    yield
    for thread in compile_threads():
        thread.join(60)
        assert not thread.is_alive()


def compile_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == COMPILE_THREAD]


def lowered(value: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * value).lower(1.0)


def add_all(compiler: BackgroundCompiler, count: int) -> None:
    for key in range(count):
        compiler.add(key, CompileTask(lambda key=key: lowered(key)))


def set_once_waited_for(gate: threading.Event, compiler: BackgroundCompiler) -> None:
    def look() -> None:
        while not compiler.progress().waiting:
            time.sleep(0.01)
        gate.set()

    threading.Thread(target=look).start()


def test_what_is_waited_for_comes_first():
    compiler, order = BackgroundCompiler(), []
    begun, gate = threading.Event(), threading.Event()
    compiler._num_cpus = 1

    def lower(key: int) -> jax.stages.Lowered:
        begun.set()
        gate.wait()
        order.append(key)
        return lowered(key)

    for key in range(4):
        compiler.add(key, CompileTask(lambda key=key: lower(key)))
    begun.wait()
    set_once_waited_for(gate, compiler)
    assert compiler.first_compiled([(3,)]) == 0
    while compiler.progress().compiled < 4:
        time.sleep(0.01)
    assert order == [0, 3, 1, 2]


def test_of_several_sets_the_most_complete_one_comes_first():
    compiler, order = BackgroundCompiler(), []
    begun, gate = threading.Event(), threading.Event()
    compiler._num_cpus = 1

    def lower(key: str) -> jax.stages.Lowered:
        if key == "extra":
            begun.set()
            gate.wait()
        order.append(key)
        return lowered(1)

    for key in ("large", "extra", "small", "small extra", "large extra"):
        compiler.add(key, CompileTask(lambda key=key: lower(key)))
        if key == "large":
            compiler.first_compiled([("large",)])
    begun.wait()
    set_once_waited_for(gate, compiler)
    sets = [("small", "small extra"), ("large", "large extra")]
    assert compiler.first_compiled(sets) == 1
    assert order[:3] == ["large", "extra", "large extra"]
    while compiler.first_compiled(sets) == 1:
        time.sleep(0.01)
    assert compiler.first_compiled(sets) == 0


def test_a_waiting_engine_lends_its_core():
    compiler, gate = BackgroundCompiler(), threading.Event()
    compiler._num_cpus = 2

    def slow() -> jax.stages.Lowered:
        gate.wait()
        return lowered(2)

    for key in range(3):
        compiler.add(key, CompileTask(slow))
    assert len(compile_threads()) == 1
    waiter = threading.Thread(target=compiler.first_compiled, args=([(2,)],))
    waiter.start()
    while len(compile_threads()) < 2:
        time.sleep(0.01)
    gate.set()
    waiter.join()


def test_calls_of_a_jitted_function_find_what_was_compiled(capsys):
    found = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    run = jax.jit(lambda x: jnp.sin(x) * 3)
    inputs = [jnp.zeros(n) for n in (3, 4, 5)]
    compiler = BackgroundCompiler(progress=True)
    lowered(1)  # whatever else compiles is compiled
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for key, x in enumerate(inputs):
            compiler.add(key, CompileTask(lambda x=x: run.lower(x)))
        compiler.wait()
        assert len(found) == 3
        assert run(inputs[1]).shape == (4,)
        assert len(found) == 3
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "Compiling steps: 100%" in capsys.readouterr().err


def test_what_is_loaded_is_not_lowered():
    compiler, kept = BackgroundCompiler(), []

    def lower() -> jax.stages.Lowered:
        raise AssertionError

    compiler.add("there", CompileTask(lower, kept.append, load=lambda: True))
    compiler.add("not", CompileTask(lambda: lowered(3), kept.append))
    compiler.wait()
    assert [program.compile()(2.0) for program in kept] == [6]


def test_an_error_reaches_who_waits_and_nobody_else():
    compiler = BackgroundCompiler()

    def broken() -> jax.stages.Lowered:
        raise ValueError("no such kernel")

    compiler.add("broken", CompileTask(broken))
    compiler.add("fine", CompileTask(lambda: lowered(2)))
    assert compiler.first_compiled([("broken",), ("fine",)]) == 1
    for other in ("broken", "never added"):
        with pytest.raises(ValueError, match="no such kernel"):
            compiler.first_compiled([("fine", "broken"), ("fine", other)])
    progress = compiler.progress()
    assert progress.compiled == progress.total == 1
    with pytest.raises(ValueError, match="no such kernel"):
        compiler.wait()


@pytest.mark.parametrize("failures", [1, 2])
def test_what_fails_beside_others_is_tried_again(failures, monkeypatch):
    tried, compile_it = [], jax.stages.Lowered.compile

    def scarce(program):
        tried.append(program)
        if len(tried) <= failures:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return compile_it(program)

    monkeypatch.setattr(jax.stages.Lowered, "compile", scarce)
    compiler = BackgroundCompiler()
    add_all(compiler, 1)
    if failures > 1:
        with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
            compiler.wait()
    else:
        compiler.wait()
    assert len(tried) == 2


def test_who_waits_in_a_terminal_sees_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(background_compiler, "_BAR_SECONDS", 0.01)
    compiler = BackgroundCompiler(progress=True)

    def slow() -> jax.stages.Lowered:
        end = time.monotonic() + 60
        while "Compiling" not in sys.stderr.getvalue() and time.monotonic() < end:  # pyright: ignore
            time.sleep(0.01)
        return lowered(2)

    compiler.add(1, CompileTask(slow))
    assert compiler.first_compiled([(1,)]) == 0
    assert "Compiling, once for this model:   0%" in capsys.readouterr().err


def test_close_ends_the_threads():
    compiler, closed = BackgroundCompiler(), threading.Event()

    def slow() -> jax.stages.Lowered:
        assert closed.wait(60)
        return lowered(2)

    for key in range(50):
        compiler.add(key, CompileTask(slow))
    compiler.close()
    closed.set()
    for thread in compile_threads():
        thread.join(60)
        assert not thread.is_alive()
    assert compiler.progress().compiled < 50
    with pytest.raises(RuntimeError, match="closed"):
        compiler.first_compiled([(49,)])


def test_an_interrupt_waits_for_nobody():
    """Programs that are being compiled are finished; no further one begins."""
    compiler, begun, go_on = BackgroundCompiler(), threading.Semaphore(0), threading.Event()

    def slow() -> jax.stages.Lowered:
        begun.release()
        assert go_on.wait(60)
        return lowered(2)

    for key in range(100):
        compiler.add(key, CompileTask(slow))
    wait = compiler._changed.wait

    def interrupted(timeout: float | None) -> None:
        assert timeout is None
        while not begun.acquire(blocking=False):
            wait(0.01)  # without the lock
        raise KeyboardInterrupt

    compiler._changed.wait = interrupted
    with pytest.raises(KeyboardInterrupt):
        compiler.wait()
    compiler._changed.wait = wait
    go_on.set()
    for thread in compile_threads():
        thread.join(60)
    assert compiler.progress().compiled < 100


class Processes:
    """Stand-ins for compile processes: what they compile is in ``kept``.

    Args:
        lanes: that a start gives.
        ended: whether they end when they get a program.
        refused: programs that they cannot compile.
    """

    def __init__(self, lanes: int = 1, *, ended: bool = False, refused: tuple[str, ...] = ()):
        self.kept: list[str] = []
        self.here: list[str] = []
        self.starts = self.closed = 0
        self.ready = threading.Event()
        self.ready.set()
        self.lanes, self.ended, self.refused = lanes, ended, refused

    def start(self) -> list[Any]:
        self.starts += 1
        return [Lane(self) for _ in range(self.lanes)]

    def task(self, name: str) -> CompileTask:
        def lower() -> jax.stages.Lowered:
            self.here.append(name)
            return lowered(1)

        return CompileTask(lower, load=lambda: name in self.kept, beside=True)

    def compiler(self, *names: str) -> BackgroundCompiler:
        compiler = BackgroundCompiler(start_lanes=self.start)
        for name in names:
            compiler.add(name, self.task(name))
        return compiler


class Lane(CompileLane):
    def __init__(self, processes: Processes) -> None:
        self.processes, self.turn, self.key = processes, threading.Lock(), ""

    def wait_until_ready(self, is_wanted) -> None:
        while not self.processes.ready.wait(0.01):
            if not is_wanted():
                raise CompileProcessEndedError("unwanted")

    def lower(self, key: Any, is_wanted) -> str | None:
        assert is_wanted()
        if self.processes.ended:
            raise CompileProcessEndedError("killed")
        self.key = key

    def wait_until_kept(self, is_wanted) -> str | None:
        assert is_wanted()
        if self.key in self.processes.refused:
            return "no memory"
        self.processes.kept.append(self.key)
        return None

    def close(self) -> None:
        self.processes.closed += 1


def finish(compiler: BackgroundCompiler) -> None:
    """Wait for everything without lending a thread."""
    while (progress := compiler.progress()).compiled < progress.total:
        time.sleep(0.01)


def test_processes_compile_what_nobody_waits_for():
    processes = Processes(lanes=2)
    processes.kept.append("there")
    compiler = processes.compiler("there", *"abcdef")
    finish(compiler)
    assert sorted(processes.kept) == [*"abcdef", "there"]
    assert not processes.here
    for thread in compile_threads():
        thread.join(60)
    assert (processes.starts, processes.closed) == (1, 2)  # nothing more to compile
    compiler.add("late", processes.task("late"))
    finish(compiler)
    assert processes.starts == 2
    assert not processes.here


def test_processes_are_not_started_for_what_is_kept():
    processes = Processes()
    processes.kept += "ab"
    finish(processes.compiler("a", "b"))
    assert processes.starts == 0


def test_a_thread_compiles_what_is_waited_for_until_processes_are_ready():
    processes = Processes()
    processes.ready.clear()
    compiler = processes.compiler(*"abc")
    assert compiler.first_compiled([("b",), ("c",)]) == 0
    assert processes.here == ["b"]
    processes.ready.set()
    finish(compiler)
    assert sorted(processes.kept) == ["a", "c"]
    assert processes.here == ["b"]


def test_threads_and_processes_share_what_everybody_waits_for():
    processes = Processes()
    processes.ready.clear()
    compiler = processes.compiler(*"abcdef")
    compiler.wait()
    assert sorted(processes.here) == [*"abcdef"]
    processes.ready.set()


def test_what_a_process_cannot_compile_a_thread_does(caplog):
    processes = Processes(refused=("b",))
    finish(processes.compiler(*"abc"))
    assert sorted(processes.kept) == ["a", "c"]
    assert processes.here == ["b"]
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "a program is compiled beside the engine's steps: no memory"
    ]


@pytest.mark.parametrize("how", ["ends", "cannot start"])
def test_without_processes_threads_compile_everything(how, caplog, monkeypatch):
    processes = Processes(lanes=2, ended=True)
    if how == "cannot start":

        def fails() -> list[Any]:
            raise OSError("killed")

        monkeypatch.setattr(processes, "start", fails)
    compiler = processes.compiler(*"abcd")
    finish(compiler)
    assert sorted(processes.here) == [*"abcd"]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["programs are compiled in the engine's process, beside its steps: killed"]
    compiler.add("late", processes.task("late"))
    finish(compiler)
    assert processes.here[-1] == "late"


def test_close_ends_processes_that_are_not_ready():
    processes = Processes()
    processes.ready.clear()
    compiler = processes.compiler(*"abc")
    while not processes.starts:
        time.sleep(0.01)
    compiler.close()
    for thread in compile_threads():
        thread.join(60)
    assert processes.closed == 1
    assert not processes.here
