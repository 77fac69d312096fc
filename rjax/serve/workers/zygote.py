"""The zygote: a preloaded process that forks worker processes."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import threading

from rjax.child_python import child_command
from rjax.serve.workers import frames
from rjax.serve.workers.tasks import TextModel

_log = logging.getLogger("rjax.serve.workers")
_BOOT = """\
import sys
from rjax.tokenization.without_torch import leave_torch_out
leave_torch_out()
from rjax.serve.workers.zygote_main import main
main(int(sys.argv[1]))
"""


class Zygote:
    """Starts worker processes. Forking the server itself would copy locks that its threads hold.

    The zygote starts in the background; the first `fork` waits until it has imported what workers
    need. If it was killed, the next `fork` restarts it. All methods are thread-safe; `fork` blocks.
    """

    def __init__(self) -> None:
        self._forking = threading.Lock()  # one fork at a time, to match results to tasks
        self._sending = threading.Lock()  # one message at a time
        self._process, self._control = _begin()

    def fork(self, model: TextModel, more_bytes: int) -> tuple[int, socket.socket]:
        """Fork a worker; return its process id, which is valid until `end`, and a socket to it.

        Args:
            model: data of the served model; loaded at the model's first fork.
            more_bytes: memory that the worker may allocate in addition to the zygote's.

        Raises:
            ChildProcessError: the zygote has ended or cannot load the model.
        """
        own, theirs = socket.socketpair()
        task = frames.pack(
            {"task": "fork", "model": dataclasses.asdict(model), "more_bytes": more_bytes}
        )
        try:
            with theirs, self._forking:
                with self._sending:
                    if self._process.poll() is not None:
                        _log.error("the workers' zygote has ended, as if killed; it starts anew")
                        self._stop()
                        self._process, self._control = _begin()
                    socket.send_fds(self._control, [task], [theirs.fileno()])
                message = frames.receive(self._control)
            if message is None or "pid" not in message[0]:
                why = "it has ended" if message is None else message[0]["error"]
                raise ChildProcessError(f"no worker process could be started: {why}")
        except BaseException as error:
            own.close()
            if isinstance(error, OSError):
                raise ChildProcessError(f"no worker process could be started: {error}") from error
            raise
        return message[0]["pid"], own

    def end(self, pid: int) -> None:
        """Kill a worker; does not block."""
        with self._sending, contextlib.suppress(OSError):  # the zygote and its workers have ended
            self._control.sendall(frames.pack({"task": "end", "pid": pid}))

    def close(self) -> None:
        """Kill the zygote and all its workers."""
        with self._sending:
            self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the zygote has its own session
        self._process.wait()
        self._control.close()


def _begin() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a zygote process; return it and its control socket."""
    own, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            child_command(_BOOT, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal goes to the server only
            env={
                **os.environ,
                # A process with threads must not fork.
                "OPENBLAS_NUM_THREADS": "1",
                "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            },
        )
    return process, own
