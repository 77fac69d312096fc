"""One worker process, as the server sees it."""

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from rjax.serve.workers import frames

_SLOW_NICENESS = 10
_OWN_SIGNALS = frozenset(
    {
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGSEGV,
        signal.SIGSYS,
        signal.SIGTRAP,
    }
)


class WorkerLostError(Exception):
    """A worker process was killed or stopped from outside; its task is not at fault."""


class WorkerProcess:
    """A worker process and the connection to it.

    Args:
        pid: id of the process.
        reader, writer: streams of its socket.
    """

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = pid
        self._reader = reader
        self._writer = writer
        self._cpu_seconds = self._read_cpu_clock()

    @property
    def has_ended(self) -> bool:
        """Whether the process has closed its socket."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def exchange(self, task: bytes) -> tuple[dict[str, Any], bytes]:
        """Send a task and read its result.

        Raises:
            asyncio.IncompleteReadError, ConnectionError: the process has ended.
        """
        self._cpu_seconds = self._read_cpu_clock()
        self._writer.write(task)
        await self._writer.drain()
        return await frames.read(self._reader)

    def has_run(self) -> bool:
        """Whether the process used CPU time since the last call, or since the task was sent.

        A process that computes uses CPU time, also on a busy machine; a process that is stopped or
        frozen uses none. The result is True where the system does not report it.
        """
        before, self._cpu_seconds = self._cpu_seconds, self._read_cpu_clock()
        return self._cpu_seconds is None or self._cpu_seconds != before

    def lower_priority(self) -> None:
        """Let quick tasks run first."""
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self.pid, _SLOW_NICENESS)

    def disconnect(self) -> None:
        """Close the connection and drop what is not sent."""
        self._writer.transport.abort()

    def _read_cpu_clock(self) -> float | None:
        """CPU seconds of the process, by the clock of Linux for another process's CPU time
        (clock_getcpuclockid(3))."""
        try:
            return time.clock_gettime(~self.pid << 3 | 2)
        except OSError:
            return None


def ended_by_itself(status: int | None) -> bool:
    """Whether an exit status is that of a process which failed, not of one that was killed.

    An allocation beyond the limit of memory ends a process in native code by SIGABRT or SIGSEGV, or
    by status 1 in Python outside a task. The kernel's OOM killer and operators use other signals.

    Args:
        status: exit code, or the negative number of a signal; None if it is not known.
    """
    return status is not None and (status > 0 or -status in _OWN_SIGNALS)


def describe_end(status: int | None) -> str:
    """Describe for the log how a process ended; takes the status of `ended_by_itself`."""
    if status is None:
        return "ended"
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited ({status})"
