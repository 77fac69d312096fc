"""Processes that compile programs beside the engine.

Python's interpreter lock and the locks of XLA are each one for a process: while a program is
lowered and compiled in the engine's process, steps wait for them, and the first run of another
program may wait until it is compiled. A process beside the engine puts its programs into the
`ProgramStore`, from which the engine loads them.
"""

import contextlib
import functools
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection, Pipe

from rjax.child_python import child_command
from rjax.config import AutoInt
from rjax.worker.program_source import ProgramSource

LANES = 2
"""Programs that a process compiles at once: while one is lowered, the other is inside XLA."""

_MAX_PROCESSES = 3
_CPUS_OF_A_PROCESS = 4
_POLL_SECONDS = 0.5
_END_SECONDS = 5.0
_CODE = (
    "from rjax.worker.compile_server import main\n"
    "main(int(sys.argv[1]), [int(fd) for fd in sys.argv[2:]])\n"
)
# The memory of the GPU is the engine's: take what is needed, and give it back at once. Neither
# setting reaches the compiler.
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


class CompileProcessError(Exception):
    """A program cannot be compiled in this process; its message says why."""


class CompileProcessEndedError(CompileProcessError):
    """The process ended; its message says why."""


class CompileLane:
    """Has one program at a time compiled by a process. Made by `start_lanes`.

    Its methods raise CompileProcessEndedError if the process has ended; they end it once
    ``is_wanted``, which they ask now and then, says no.
    """

    def __init__(self, process: "_Process", connection: Connection) -> None:
        self._process = process
        self._connection = connection

    def wait_until_ready(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the process can take a program, which takes seconds after its start."""
        self._receive(is_wanted)

    def turn(self) -> threading.Lock:
        """The lock held by the one lane of a process whose program is chosen and lowered."""
        return self._process.turn

    def lower(self, key: Hashable, is_wanted: Callable[[], bool]) -> None:
        """Have a program lowered, and go on to compile it.

        Args:
            key: a `ProgramKey`.
            is_wanted: see above.

        Raises:
            CompileProcessError: it cannot be lowered.
        """
        try:
            self._connection.send(key)
        except OSError as ended:
            raise CompileProcessEndedError(self._process.reason()) from ended
        self._receive(is_wanted)

    def wait_until_kept(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until the program is compiled and in the store.

        Raises:
            CompileProcessError: it cannot be compiled.
        """
        self._receive(is_wanted)

    def _receive(self, is_wanted: Callable[[], bool]) -> None:
        try:
            while not self._connection.poll(_POLL_SECONDS):
                if not is_wanted():
                    self._process.kill()
                    raise CompileProcessEndedError("the engine needs no more programs")
            error = self._connection.recv()
        except (EOFError, OSError) as ended:
            raise CompileProcessEndedError(self._process.reason()) from ended
        if error is not None:
            raise CompileProcessError(error)

    def close(self) -> None:
        """Give the lane back; with the last one the process ends."""
        self._connection.close()
        self._process.give_back()


def lanes_starter(
    source: ProgramSource, num_processes: AutoInt
) -> Callable[[], list[CompileLane]] | None:
    """A function that starts the processes of an engine; None if it has none.

    Args:
        source: what the processes lower and compile the programs from.
        num_processes: the value of ``EngineConfig.compile_processes``.
    """
    if num_processes == "auto":
        on_cpu = source.arguments.mesh.devices.flat[0].platform == "cpu"  # steps need the cores
        cpus = 0 if on_cpu else os.cpu_count() or 1
        num_processes = min(_MAX_PROCESSES, cpus // _CPUS_OF_A_PROCESS)
    return functools.partial(start_lanes, source, num_processes) if num_processes else None


def start_lanes(source: ProgramSource, num_processes: int) -> list[CompileLane]:
    """Start processes, without waiting for them.

    Raises:
        OSError: a process cannot be started.
    """
    data = source.dumps()
    return [lane for _ in range(num_processes) for lane in _Process(data).lanes]


class _Process:
    def __init__(self, data: bytes) -> None:
        pipes = [Pipe() for _ in range(LANES + 1)]
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
        self.lanes = [CompileLane(self, connection) for connection in connections]
        self.turn = threading.Lock()
        self._open = LANES
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
