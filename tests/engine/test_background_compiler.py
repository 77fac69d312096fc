"""Threads that compile: the order, errors, interrupts, and the end."""

import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rjax.batch.compile_progress import COMPILE_THREAD
from rjax.worker import background_compiler
from rjax.worker.background_compiler import BackgroundCompiler, CompileTask


@pytest.fixture(autouse=True)
def _threads_end():
    """A thread that compiles uses Python's random numbers, which other tests watch."""
    yield
    for thread in compile_threads():
        thread.join(20)
        assert not thread.is_alive()


def compile_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == COMPILE_THREAD]


def lowered(value: float) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * value).lower(1.0)


def add_all(compiler: BackgroundCompiler, count: int) -> None:
    for key in range(count):
        compiler.add(key, CompileTask(lambda key=key: lowered(key)))


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
    threading.Timer(0.2, gate.set).start()
    assert compiler.first_compiled([3]) == 0
    while compiler.progress().compiled < 4:
        time.sleep(0.01)
    assert order == [0, 3, 1, 2]


def test_a_waiting_engine_lends_its_core():
    compiler, gate = BackgroundCompiler(), threading.Event()
    compiler._num_cpus = 2

    def slow() -> jax.stages.Lowered:
        gate.wait()
        return lowered(2)

    for key in range(3):
        compiler.add(key, CompileTask(slow))
    assert len(compile_threads()) == 1
    waiter = threading.Thread(target=compiler.first_compiled, args=([2],))
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
    compiler = BackgroundCompiler()
    lowered(1)  # whatever else compiles is compiled
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for key, x in enumerate(inputs):
            compiler.add(key, CompileTask(lambda x=x: run.lower(x)))
        compiler.wait(title="Compiling sines", progress=True)
        assert len(found) == 3
        assert run(inputs[1]).shape == (4,)
        assert len(found) == 3
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "Compiling sines: 100%" in capsys.readouterr().err


def test_what_is_loaded_is_not_lowered():
    compiler, kept = BackgroundCompiler(), []

    def lower() -> jax.stages.Lowered:
        raise AssertionError

    compiler.add("there", CompileTask(lower, kept.append, load=lambda: True))
    compiler.add("not", CompileTask(lambda: lowered(3), kept.append))
    compiler.wait(title="", progress=False)
    assert [program.compile()(2.0) for program in kept] == [6]


def test_an_error_reaches_who_waits_and_nobody_else():
    compiler = BackgroundCompiler()

    def broken() -> jax.stages.Lowered:
        raise ValueError("no such kernel")

    compiler.add("broken", CompileTask(broken))
    compiler.add("fine", CompileTask(lambda: lowered(2)))
    assert compiler.first_compiled(["broken", "fine"]) == 1
    for keys in (["broken"], ["broken", "never added"]):
        with pytest.raises(ValueError, match="no such kernel"):
            compiler.first_compiled(keys)
    progress = compiler.progress()
    assert progress.compiled == progress.total == 1
    with pytest.raises(ValueError, match="no such kernel"):
        compiler.wait(title="", progress=False)


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
            compiler.wait(title="", progress=False)
    else:
        compiler.wait(title="", progress=False)
    assert len(tried) == 2


def test_who_waits_in_a_terminal_sees_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(background_compiler, "_BAR_SECONDS", 0.01)
    compiler = BackgroundCompiler(progress=True)

    def slow() -> jax.stages.Lowered:
        time.sleep(0.5)
        return lowered(2)

    compiler.add(1, CompileTask(slow))
    assert compiler.first_compiled([1]) == 0
    assert "Compiling, once for this model:   0%" in capsys.readouterr().err


def test_close_ends_the_threads():
    compiler = BackgroundCompiler()
    add_all(compiler, 50)
    compiler.close()
    for thread in compile_threads():
        thread.join(20)
        assert not thread.is_alive()
    assert compiler.progress().compiled < 50
    with pytest.raises(RuntimeError, match="closed"):
        compiler.first_compiled([49])


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
        compiler.wait(title="", progress=False)
    compiler._changed.wait = wait
    go_on.set()
    for thread in compile_threads():
        thread.join(20)
    assert compiler.progress().compiled < 100
