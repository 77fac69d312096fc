"""The zygote: a preloaded process that forks worker processes."""

import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from rjax.child_python import child_command
from rjax.serve.workers import frames
from rjax.serve.workers.tasks import TextModel

_LOAD_SECONDS = 120.0  # for the imports of a zygote, and for a model that it has not loaded
_ANSWER_SECONDS = 10.0  # for everything else; more than a moment on an overloaded machine only
_END_SECONDS = 5.0
_log = logging.getLogger("rjax.serve.workers")
_BOOT = """\
import sys
from rjax.tokenization.without_torch import leave_torch_out
leave_torch_out()
from rjax.serve.workers.zygote_main import main
main(int(sys.argv[1]))
"""


class _ZygoteLostError(Exception):
    """The zygote was killed, or does not answer and was killed for it."""


class Zygote:
    """Starts worker processes. Forking the server itself would copy locks that its threads hold.

    The zygote starts in the background; the first `fork` waits until it has imported what workers
    need. A zygote that was killed, or that does not answer in time because it was stopped, starts
    anew at the next `fork`, and all its workers are killed. All methods are thread-safe.
    """

    def __init__(self) -> None:
        self._asking = threading.Lock()  # one question at a time, to match answers to them
        self._sending = threading.Lock()  # one message at a time; held for a moment only
        self._is_closed = False
        self._model: TextModel | None = None  # of the last fork
        self._workers: set[int] = set()  # of this process
        self._process, self._control = _begin()

    def fork(self, model: TextModel, more_bytes: int) -> tuple[int, socket.socket]:
        """Fork a worker; return its process id, which is valid until `end`, and a socket to it.

        Blocks, for a fraction of a second if the zygote has loaded the model.

        Args:
            model: data of the served model; loaded at the model's first fork.
            more_bytes: memory that the worker may allocate in addition to the zygote's.

        Raises:
            ChildProcessError: two zygotes have ended or did not answer, or the zygote cannot load
                the model or cannot fork.
        """
        with self._asking:
            try:
                return self._fork(model, more_bytes)
            except _ZygoteLostError as error:
                _log.error("the workers' zygote %s; it starts anew", error)
            try:
                return self._fork(model, more_bytes)
            except _ZygoteLostError as error:
                raise ChildProcessError(
                    f"no worker process could be started: twice, the zygote {error}"
                ) from error

    def _fork(self, model: TextModel, more_bytes: int) -> tuple[int, socket.socket]:
        own, theirs = socket.socketpair()
        try:
            with theirs:
                with self._sending:
                    self._begin_anew()
                task = {"task": "fork", "model": dataclasses.asdict(model)}
                answer = self._ask(
                    {**task, "more_bytes": more_bytes},
                    _ANSWER_SECONDS if model == self._model else _LOAD_SECONDS,
                    [theirs.fileno()],
                )
            if "pid" not in answer:
                raise ChildProcessError(f"no worker process could be started: {answer['error']}")
        except BaseException:
            own.close()
            raise
        self._model = model
        self._workers.add(answer["pid"])
        return answer["pid"], own

    def reap(self, pid: int) -> int | None:
        """Wait for a worker that has closed its socket, and kill it if it has not ended. Blocks.

        Returns:
            its exit code, or the negative number of the signal that ended it; None if the zygote
            cannot tell.
        """
        with self._asking:
            if pid not in self._workers:
                return None
            self._workers.discard(pid)
            try:
                return self._ask({"task": "reap", "pid": pid}, _ANSWER_SECONDS)["status"]
            except _ZygoteLostError as error:
                _log.error("the workers' zygote %s; it starts anew for the next worker", error)
                return None

    def end(self, pid: int) -> None:
        """Kill a worker; does not block."""
        with self._sending:
            if pid not in self._workers:  # its zygote has ended
                return
            self._workers.discard(pid)
            if self._process.poll() is not None:
                self._stop()
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # the zygote may be stopped; it reaps the worker later
            with contextlib.suppress(OSError):
                self._control.sendall(frames.pack({"task": "end", "pid": pid}))

    def close(self) -> None:
        """Kill the zygote and all its workers."""
        with self._sending:
            self._is_closed = True
            self._stop()

    def _ask(self, task: dict[str, Any], seconds: float, fds: Sequence[int] = ()) -> dict[str, Any]:
        """The zygote's answer. Raises `_ZygoteLostError` after it has killed the zygote."""
        try:
            with self._sending:
                control = self._control
                control.settimeout(seconds)
                socket.send_fds(control, [frames.pack(task)], fds)
            message = frames.receive(control)
        except TimeoutError:
            why = f"did not answer within {seconds:g} seconds, as if stopped"
        except OSError as error:
            why = f"has ended ({error})"
        else:
            if message is not None:
                return message[0]
            why = "has ended, as if killed"
        with self._sending:
            self._stop()
        raise _ZygoteLostError(why)

    def _begin_anew(self) -> None:
        """Start a new zygote if this one has ended."""
        if self._is_closed:
            raise ChildProcessError("no worker process could be started: the server has stopped")
        if self._process.poll() is not None:
            self._stop()
            self._process, self._control = _begin()

    def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the zygote has its own session
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._control.close()
        self._workers.clear()
        self._model = None


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
