"""Processes that compile programs beside the engine.

Python's interpreter lock and the locks of XLA are each one for a process: while a program is
lowered and compiled in the engine's process, steps wait for them, and the first run of another
program may wait until it is compiled. A process beside the engine puts its programs into the
`ProgramStore`, from which the engine loads them.

A process has a few lanes, each a thread and a socket. A lane sends None when it is ready. It then
receives keys of programs and answers each key twice, when the program is lowered and when it is
compiled and in the store: with None, or with an error, which is the last answer. The process
imports this module too, which therefore imports no JAX: signals are ignored before that.
"""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection, Pipe
from typing import Any, Literal

from rjax.child_python import child_command

_LANES = 2  # of a process: while one lowers a program, the other is inside XLA
_MAX_PROCESSES = 3
_CPUS_OF_A_PROCESS = 4
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0
_IGNORED = (signal.SIGINT, signal.SIGTERM)
_NICENESS = 10  # the engine's threads get the cores first
_CODE = (
    "from rjax.worker.programs.compile_process import compile_for_engine\n"
    "compile_for_engine(int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]])\n"
)
# The memory of the GPU is the engine's: take what is needed, and give it back at once. Neither
# setting reaches the compiler.
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


class CompileProcessEndedError(Exception):
    """The process ended; its message says why."""


class CompileLane:
    """Has one program at a time compiled by a process.

    Its methods raise CompileProcessEndedError if the process has ended; they end it once
    ``is_wanted``, which they ask now and then, says no.

    Attributes:
        turn: the lock held by the one lane of a process whose program is chosen and lowered.
    """

    def __init__(self, process: "_Process", connection: Connection) -> None:
        self.turn = process.turn
        self._process = process
        self._connection = connection

    def wait_until_ready(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the process can take a program, which takes seconds after its start."""
        self._receive(is_wanted)

    def lower(self, key: Hashable, is_wanted: Callable[[], bool]) -> str | None:
        """Have the program of a `ProgramKey` lowered, and go on to compile it; returns why it
        cannot be lowered."""
        try:
            self._connection.send(key)
        except OSError as ended:
            raise CompileProcessEndedError(self._process.reason()) from ended
        return self._receive(is_wanted)

    def wait_until_kept(self, is_wanted: Callable[[], bool]) -> str | None:
        """Wait until the program is compiled and in the store; returns why it cannot be."""
        return self._receive(is_wanted)

    def _receive(self, is_wanted: Callable[[], bool]) -> str | None:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if not is_wanted():
                    self._process.kill()
                    raise CompileProcessEndedError("the engine needs no more programs")
            return self._connection.recv()
        except (EOFError, OSError) as ended:
            raise CompileProcessEndedError(self._process.reason()) from ended

    def close(self) -> None:
        """Give the lane back; with the last one the process ends."""
        self._connection.close()
        self._process.give_back()


def lanes_starter(
    source: Callable[[], bytes], num_processes: int | Literal["auto"], platform: str
) -> Callable[[], list[CompileLane]] | None:
    """A function that starts the processes of an engine, without waiting for them; None if it has
    none. The function raises OSError if a process cannot be started.

    Args:
        source: ``dumps`` of the `ProgramSource` of the programs.
        num_processes: the value of ``EngineConfig.compile_processes``.
        platform: platform that runs the steps, as JAX names it.
    """
    if num_processes == "auto":
        cpus = 0 if platform == "cpu" else os.cpu_count() or 1  # steps on a CPU need the cores
        num_processes = min(_MAX_PROCESSES, cpus // _CPUS_OF_A_PROCESS)
    return functools.partial(_start_lanes, source, num_processes) if num_processes else None


def _start_lanes(source: Callable[[], bytes], num_processes: int) -> list[CompileLane]:
    data = source()
    return [lane for _ in range(num_processes) for lane in _Process(data).lanes]


class _Process:
    def __init__(self, data: bytes) -> None:
        pipes = [Pipe() for _ in range(_LANES + 1)]
        theirs = [end.fileno() for _, end in pipes]
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            self._child = subprocess.Popen(
                child_command(_CODE, *map(str, theirs)),
                stdin=file,
                pass_fds=theirs,
                env=os.environ | _MEMORY,
            )
        for _, end in pipes:
            end.close()
        self._control, *connections = (end for end, _ in pipes)
        self.turn = threading.Lock()
        self.lanes = [CompileLane(self, connection) for connection in connections]
        self._open = _LANES
        self._reason: str | None = None
        self._lock = threading.Lock()

    def reason(self) -> str:
        """Why it ended."""
        with self._lock:
            if self._reason is None:
                self._reason = self._find_reason()
            return self._reason

    def _find_reason(self) -> str:
        with contextlib.suppress(EOFError, OSError):
            if self._control.poll(_END_SECONDS):
                return self._control.recv()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the compile process ended with status {self._child.wait(_END_SECONDS)}"
        return "the compile process closed its socket"

    def kill(self) -> None:
        self._child.kill()

    def give_back(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open:
                return
        self._control.close()
        try:
            self._child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def compile_for_engine(control: int, lanes: list[int]) -> None:
    """Serve the engine at the other ends of these sockets; the whole life of a compile process.

    Stdin has what `ProgramSource.dumps` wrote. SIGINT and SIGTERM are for the engine: the process
    ends when the engine closes the sockets or ends.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    os.nice(_NICENESS)
    engine = Connection(control)
    try:
        from rjax.console import quiet_imports

        quiet_imports()
        from rjax.worker.programs.cache import keep_compiled
        from rjax.worker.programs.source import ProgramSource

        keep_compiled(None)
        programs = ProgramSource.loads(sys.stdin.buffer.read()).programs()
    except Exception as error:
        engine.send(_one_line(error))
        os._exit(1)
    again = threading.Lock()
    for fd in lanes:
        lane = Connection(fd), programs, again
        threading.Thread(target=_serve, args=lane, daemon=True).start()
    try:
        engine.recv()
    except (EOFError, OSError):
        os._exit(0)  # without waiting for programs that are being compiled


def _serve(engine: Connection, programs: Any, again: threading.Lock) -> None:
    import jax

    with contextlib.suppress(EOFError, OSError):
        engine.send(None)
        while True:
            key = engine.recv()
            try:
                lowered = programs.lower(key)
                engine.send(None)
                try:
                    programs.compile_for_disk(key, lowered)
                except jax.errors.JaxRuntimeError:  # too little memory beside other programs
                    with again:
                        programs.compile_for_disk(key, lowered)
                engine.send(None)
            except Exception as error:
                engine.send(_one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
