"""What is typed while an answer is awaited: hidden, kept for the next prompt, and shown again."""

import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from rjax.cli.terminal import set_echo, typing_hidden

ENDED = """
import os, signal, sys, time
from rjax.cli.process import run_process
from rjax.cli.terminal import typing_hidden

def main():
    signal.signal(signal.SIGINT, lambda *_: None)  # as a chat, which an interrupt does not end
    with typing_hidden():
        print("hidden", flush=True)
        while True:
            time.sleep(0.05)

run_process("it", main)
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal: who types, and the program."""
    typist, program = os.openpty()
    yield typist, program
    os.close(typist)
    os.close(program)


@pytest.fixture
def stdin(terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with os.fdopen(os.dup(terminal[1])) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield


def is_shown(program: int) -> bool:
    return bool(termios.tcgetattr(program)[3] & termios.ECHO)


@pytest.mark.usefixtures("stdin")
def test_what_is_typed_meanwhile_is_read_next(terminal: tuple[int, int]) -> None:
    typist, program = terminal
    with typing_hidden():
        assert not is_shown(program)
        os.write(typist, b"ahead\n")
        select.select([program], [], [], 10)  # the terminal may take it a little later
        with typing_hidden():
            pass
        assert not is_shown(program), "the block around it goes on"
    assert is_shown(program)
    assert sys.stdin.readline() == "ahead\n"
    os.set_blocking(typist, False)
    with pytest.raises(BlockingIOError):  # nothing was echoed
        os.read(typist, 100)
    with pytest.raises(KeyboardInterrupt), typing_hidden():
        raise KeyboardInterrupt
    assert is_shown(program)


@pytest.mark.usefixtures("stdin")
def test_a_terminal_that_hides_it_already_goes_on_to(terminal: tuple[int, int]) -> None:
    assert set_echo(shown=False)
    with typing_hidden():
        pass
    assert not is_shown(terminal[1])


def test_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as null:
        monkeypatch.setattr(sys, "stdin", null)
        assert not set_echo(shown=False)
    assert not set_echo(shown=False), "closed"
    monkeypatch.setattr(sys, "stdin", None)
    assert not set_echo(shown=False)


def test_a_process_that_is_ended_at_once_shows_it_again(terminal: tuple[int, int]) -> None:
    _, program = terminal
    process = subprocess.Popen(
        [sys.executable, "-c", ENDED], stdin=program, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hidden\n"
        assert not is_shown(program)
        while process.poll() is None:  # twice within a second ends it
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.returncode == 130
        assert is_shown(program)
    finally:
        process.kill()
        process.communicate()
