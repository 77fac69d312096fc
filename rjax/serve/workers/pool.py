"""Runs tasks in worker processes with limits on time and memory."""

import asyncio
import contextlib
import dataclasses
import os
from typing import Any

from rjax.errors import ContextLengthError, InvalidRequestError, OverloadedError
from rjax.serve.protocol.errors import ApiError
from rjax.serve.workers import frames
from rjax.serve.workers.task_slots import TaskSlot, TaskSlots
from rjax.serve.workers.tasks import TextModel
from rjax.serve.workers.zygote import Zygote

_QUICK_SECONDS = 1.0  # after which a task is slow
_SLOW_NICENESS = 10
_MAX_GROWTH_BYTES = 64 * 2**20  # a worker whose memory grew by more is replaced


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of a pool.

    Attributes:
        quick: concurrent tasks that have run for less than a second.
        slow: concurrent tasks that have run for longer; further ones are ended.
        queued: waiting tasks of one tenant.
        wait_seconds: longest time in the queue.
        task_seconds: longest time of a task.
        task_bytes: most memory of a task.
    """

    quick: int
    slow: int
    queued: int
    wait_seconds: float
    task_seconds: float
    task_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A worker process."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WorkerPool:
    """Worker processes for one kind of task.

    A new task waits only for quick tasks. A task that has run for a second continues at a lower
    priority in one of a few slow slots. If none is free, the task is ended and its client is asked
    to try again later. A task that exceeds its time or memory is killed.

    Args:
        zygote: starts the processes.
        model: data of the served model.
        limits: of the pool.
        shared: whether several tenants use it.
    """

    def __init__(
        self, zygote: Zygote, model: TextModel, limits: WorkerLimits, *, shared: bool
    ) -> None:
        self._zygote = zygote
        self._model = model
        self._limits = limits
        self._slots = TaskSlots(
            quick=limits.quick, slow=limits.slow, queued=limits.queued, shared=shared
        )
        self._idle: list[_Worker] = []
        self._closed = False

    async def run(
        self, head: dict[str, Any], data: bytes, *, tenant: str, what: str
    ) -> tuple[dict[str, Any], bytes]:
        """Run a task and return its result.

        Args:
            head, data: message to the worker.
            tenant: of the client.
            what: description of the task, for messages.

        Raises:
            InvalidRequestError: the task refuses the client's text.
            ApiError: 400, it took too long or too much memory.
            OverloadedError: too many tasks wait, or too many slow tasks run.
        """
        slot = await self._slots.enter(tenant, self._limits.wait_seconds)
        worker = None
        try:
            worker = self._idle.pop() if self._idle else await self._start()
            head, data = await self._answer(worker, slot, frames.pack(head, data), what)
        except BaseException:
            if worker is not None:
                self._end(worker)
            raise
        finally:
            slot.leave()
        # An unprivileged process cannot raise a worker's priority again.
        if slot.is_slow or head["grown"] > _MAX_GROWTH_BYTES:
            self._end(worker)
        else:
            self._keep(worker)
        match head.get("error"):
            case None:
                return head, data
            case "invalid":
                raise InvalidRequestError(head["message"])
            case "context":
                raise ContextLengthError(head["message"])
            case "memory":
                raise self._too_large(what)
        raise RuntimeError(f"{what} failed in a worker process")

    async def start(self) -> None:
        """Start one idle worker."""
        self._keep(await self._start())

    def close(self) -> None:
        """End the idle workers now, and the others when their tasks are done."""
        self._closed = True
        while self._idle:
            self._end(self._idle.pop())

    async def _answer(
        self, worker: _Worker, slot: TaskSlot, task: bytes, what: str
    ) -> tuple[dict[str, Any], bytes]:
        seconds = self._limits.task_seconds
        quick = min(_QUICK_SECONDS, seconds)
        reading = asyncio.ensure_future(_exchange(worker, task))
        try:
            done, _ = await asyncio.wait({reading}, timeout=quick)
            if not done and seconds > quick:
                if not slot.slow_down():
                    raise OverloadedError(
                        f"{what} takes longer than {quick:g} seconds and too many such requests "
                        "run; try again later",
                        "slow_tasks",
                    )
                with contextlib.suppress(OSError):  # it has ended
                    os.setpriority(os.PRIO_PROCESS, worker.pid, _SLOW_NICENESS)
                done, _ = await asyncio.wait({reading}, timeout=seconds - quick)
            if done:
                return reading.result()
            raise ApiError(
                400, f"{what} takes longer than {seconds:g} seconds; ask for less", code="too_slow"
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            # Native code in a worker ends the process if an allocation fails.
            raise self._too_large(what) from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            400,
            f"{what} takes more than {self._limits.task_bytes} bytes of memory; ask for less",
            code="too_large",
        )

    async def _start(self) -> _Worker:
        starting = asyncio.ensure_future(self._fork())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._drop)
            raise

    async def _fork(self) -> _Worker:
        pid, own = await asyncio.to_thread(self._zygote.fork, self._model, self._limits.task_bytes)
        reader, writer = await asyncio.open_connection(sock=own)
        return _Worker(pid, reader, writer)

    def _drop(self, started: "asyncio.Future[_Worker]") -> None:
        """End a worker whose start was cancelled."""
        if not started.cancelled() and started.exception() is None:
            self._end(started.result())

    def _keep(self, worker: _Worker) -> None:
        if self._closed or len(self._idle) >= self._limits.quick:
            self._end(worker)
        else:
            self._idle.append(worker)

    def _end(self, worker: _Worker) -> None:
        worker.writer.transport.abort()
        self._zygote.end(worker.pid)


async def _exchange(worker: _Worker, task: bytes) -> tuple[dict[str, Any], bytes]:
    worker.writer.write(task)
    await worker.writer.drain()
    return await frames.read(worker.reader)
