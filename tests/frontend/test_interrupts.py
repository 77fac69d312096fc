"""Ctrl-C ends a command soon and with status 130, whatever the process is doing."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

SOON = 40.0  # seconds: the promise is one, and the machine may be busy

STUBBORN = """
def main():
    print("ready", flush=True)
    while True:
        try:
            time.sleep(60)  # as a compiler that hears of no interrupt
        except KeyboardInterrupt:
            pass
"""
TURNED = """
def main():
    print("ready", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise ImportError("while a library began") from None
"""
COMPILING = """
def main():
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    time.sleep(60)
"""
COMMAND = """
from rjax.cli.errors import run_command
def main():
    def body():
        print("answer so far")  # in a buffer
        print("ready", file=sys.stderr, flush=True)
        time.sleep(60)
    return run_command("it", body)
"""
TWICE = """
def main():
    signal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""
SOON_ENDED = """
def main():
    signal.signal(signal.SIGINT, lambda *_: end_soon("it"))
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("ready", flush=True)
    while True:
        time.sleep(60)
"""
OWN = """
def main():
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    print("ready", flush=True)
    while not asked:
        time.sleep(0.01)
    time.sleep(2)
    return 7
"""


def interrupted(
    command: list[str], ready: Callable[[subprocess.Popen], object], **environment: str
) -> tuple[int, float, str, str]:
    """Status, seconds and output of a process that gets SIGINT once it is ready."""
    # Where tests run in the background, a shell has them, and so their children, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    signal.signal(signal.SIGINT, before)
    try:
        ready(process)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        return process.returncode, time.monotonic() - start, out, err
    finally:
        process.kill()
        process.wait()


def stub(main: str) -> list[str]:
    head = "import os, signal, sys, threading, time"
    own = "from rjax.cli.process import end_soon, run_process"
    return [sys.executable, "-c", f"{head}\n{own}\n{main}\nrun_process('it', main)"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("main", [STUBBORN, TURNED, COMPILING, TWICE, SOON_ENDED])
def test_every_process_ends(main: str) -> None:
    status, seconds, _, err = interrupted(stub(main), lambda p: p.stdout.readline())
    assert (status, err) == (130, "it: interrupted\n")
    assert seconds < SOON


def test_what_was_written_is_not_lost() -> None:
    status, seconds, out, err = interrupted(stub(COMMAND), lambda p: p.stderr.readline())
    assert (status, out, err) == (130, "answer so far\n", "it: interrupted\n")
    assert seconds < SOON


@pytest.mark.slow
def test_a_command_that_handles_one_itself_is_left_alone() -> None:
    status, _, _, err = interrupted(stub(OWN), lambda p: p.stdout.readline())
    assert (status, err) == (7, "")


def test_an_error_of_its_own_keeps_its_traceback() -> None:
    done = subprocess.run(stub("def main(): 1 / 0"), capture_output=True, text=True)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_while_it_imports() -> None:
    command = [sys.executable, "-v", "-m", "rjax.generate", "--no-progress"]

    def imports(process: subprocess.Popen) -> None:
        for line in process.stderr:  # type: ignore[union-attr]
            if line.startswith("import 'rjax.cli.arguments'"):
                return

    status, seconds, _, err = interrupted(command, imports)
    assert status == 130
    assert "Traceback" not in err
    assert seconds < SOON


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "generate",
        "generate --warmup on",
        "generate --warmup background",
        "chat",
        "serve --port 0",
        "bench latency --quiet",
    ],
)
@pytest.mark.parametrize("seconds", [0.5, 1, 2, 4, 6, 8, 10, 14, 18])
def test_at_every_moment(command: str, seconds: float, tmp_path) -> None:
    """Importing, loading, compiling (nothing is kept from other runs), generating, waiting for a
    line, and serving."""
    argv = [sys.executable, "-m", "rjax", *command.split(), "--num-pages", "300"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    status, taken, _, err = interrupted(argv, lambda _: time.sleep(seconds), **cache)
    assert status == 130, err
    assert re.search(rf"rjax {command.split()[0]}( latency)?: interrupted\n\Z", err), err
    assert taken < SOON
