"""The main function of a compile process, which `rjax.worker.compile_process` starts.

A thread for each lane says None when it is ready. It then receives keys of programs, and answers
each twice: when the program is lowered, and when it is compiled and in the store; with None, or
with an error, which is the last answer. SIGINT and SIGTERM are for the engine; this process ends
when the engine closes the sockets or ends.
"""

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

_IGNORED = (signal.SIGINT, signal.SIGTERM)
_NICENESS = 10  # the engine's threads get the cores first


def main(control: int, lanes: list[int]) -> None:
    """Serve the engine at the other ends of these sockets, and end the process.

    What it compiles comes from stdin, as `ProgramSource.dumps` wrote it.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    os.nice(_NICENESS)
    engine = Connection(control)
    try:
        programs = _programs()
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


def _programs() -> Any:
    from rjax.quiet_imports import quiet_imports

    quiet_imports()
    from rjax.worker.compilation_cache import keep_compiled
    from rjax.worker.program_source import ProgramSource

    keep_compiled(None)
    return ProgramSource.loads(sys.stdin.buffer.read()).programs()


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
                    programs.keep(key, lowered)
                except jax.errors.JaxRuntimeError:  # too little memory beside other programs
                    with again:
                        programs.keep(key, lowered)
                engine.send(None)
            except Exception as error:
                engine.send(_one_line(error))


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
