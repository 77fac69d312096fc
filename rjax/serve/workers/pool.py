"""Runs tasks in worker processes with limits on time and memory."""

import asyncio
import dataclasses
import logging
import socket
import time
from typing import Any

from rjax.errors import ContextLengthError, InvalidRequestError, OverloadedError
from rjax.serve.protocol.errors import ApiError
from rjax.serve.workers import frames
from rjax.serve.workers.task_slots import TaskSlot, TaskSlots
from rjax.serve.workers.tasks import TextModel
from rjax.serve.workers.worker_process import (
    WorkerLostError,
    WorkerProcess,
    describe_end,
    ended_by_itself,
)
from rjax.serve.workers.zygote import Zygote

_QUICK_SECONDS = 1.0  # after which a task is slow
_LOOK_SECONDS = 2.0  # between two looks whether the process of a slow task runs
_LATE_SECONDS = 5.0  # after which a worker that does not start counts against the health
_START_SECONDS = 30.0  # longest time that a task waits for a worker to start
_REAP_SECONDS = 5.0  # longest time that a task waits to know why its worker has ended
_TRIAL_SECONDS = 1.0  # for a new worker to answer, and until the next is tried
_MAX_GROWTH_BYTES = 64 * 2**20  # a worker whose memory grew by more is replaced
_log = logging.getLogger("rjax.serve.workers")


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


class WorkerPool:
    """Worker processes for one kind of task.

    A new task waits only for quick tasks. A task that has run for a second continues at a lower
    priority in one of a few slow slots. If none is free, the task is ended and its client is asked
    to try again later. A task that exceeds its time or memory is killed.

    A task whose worker was killed or stopped from outside runs once more, on a new worker.

    Args:
        zygote: starts the processes.
        model: data of the served model.
        limits: the pool's limits.
        shared: whether several tenants use it.

    Attributes:
        is_hung: no worker can answer, neither for a task nor for a trial. Trials go on until one
            can.
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
        self._idle: list[WorkerProcess] = []
        self._unclaimed: list[asyncio.Future[WorkerProcess]] = []  # starts that no task waits for
        self._trying: asyncio.Task[None] | None = None
        self._answered = time.monotonic()  # when a worker last did
        self._closed = False
        self.is_hung = False

    async def run(
        self, head: dict[str, Any], data: bytes, *, tenant: str, what: str
    ) -> tuple[dict[str, Any], bytes]:
        """Run a task and return its result.

        Args:
            head, data: message to the worker.
            tenant: name of the client's tenant.
            what: description of the task, for messages.

        Raises:
            InvalidRequestError: the task refuses the client's text.
            ApiError: 400, it took too long or too much memory; 503, its workers were lost.
            OverloadedError: too many tasks wait, or too many slow tasks run.
        """
        slot = await self._slots.enter(tenant, self._limits.wait_seconds)
        try:
            head, data = await self._run(slot, frames.pack(head, data), what)
        finally:
            slot.leave()
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
        self._keep(await self._fork())

    def close(self) -> None:
        """End the idle workers now, and the others when their tasks are done."""
        self._closed = True
        if self._trying is not None:
            self._trying.cancel()
        while self._idle:
            self._end(self._idle.pop())

    async def _run(self, slot: TaskSlot, task: bytes, what: str) -> tuple[dict[str, Any], bytes]:
        """Run a task in a slot, once more if its worker is lost."""
        try:
            try:
                return await self._run_on(self._pop_idle(), slot, task, what)
            except WorkerLostError as error:
                _log.warning("%s while %s; a new worker gets the task", error, what)
            return await self._run_on(None, slot, task, what)
        except WorkerLostError as error:
            _log.error("%s while %s, for the second time; the task is given up", error, what)
            found = "its worker process was killed or stopped, and so was that of a second try"
        except ChildProcessError as error:
            _log.error("%s; it was needed for %s", error, what)
            found = "the server can start no worker process now"
            self.is_hung = True
        self._try_workers()
        raise ApiError(503, f"{what} failed: {found}; try again later", code="worker_lost")

    async def _run_on(
        self, idle: WorkerProcess | None, slot: TaskSlot, task: bytes, what: str
    ) -> tuple[dict[str, Any], bytes]:
        """Run a task on an idle worker, or on a new one.

        Raises:
            WorkerLostError: the worker was killed or stopped from outside.
            ChildProcessError: no worker could be started.
        """
        worker = idle or await self._start()
        try:
            head, data = await self._answer(worker, slot, task, what)
        except BaseException:
            self._end(worker)
            raise
        self._has_answered()
        # An unprivileged process cannot raise a worker's priority again.
        if slot.is_slow or head["grown"] > _MAX_GROWTH_BYTES:
            self._end(worker)
        else:
            self._keep(worker)
        return head, data

    async def _answer(
        self, worker: WorkerProcess, slot: TaskSlot, task: bytes, what: str
    ) -> tuple[dict[str, Any], bytes]:
        seconds = self._limits.task_seconds
        quick = min(_QUICK_SECONDS, seconds)
        reading = asyncio.ensure_future(worker.exchange(task))
        try:
            await _wait_running(reading, worker, quick)
            if not reading.done() and seconds > quick:
                if not (slot.is_slow or slot.slow_down()):
                    raise OverloadedError(
                        f"{what} takes longer than {quick:g} seconds and too many such requests "
                        "run; try again later",
                        "slow_tasks",
                    )
                worker.lower_priority()
                await _wait_running(reading, worker, seconds - quick)
            if reading.done():
                return reading.result()
            raise ApiError(
                400, f"{what} takes longer than {seconds:g} seconds; ask for less", code="too_slow"
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._reap(worker)
            if ended_by_itself(status):
                raise self._too_large(what) from None
            raise WorkerLostError(f"worker {worker.pid} {describe_end(status)}") from None
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _reap(self, worker: WorkerProcess) -> int | None:
        """The exit status of a worker that has closed its socket; see `Zygote.reap`."""
        reaping = asyncio.to_thread(self._zygote.reap, worker.pid)
        try:
            return await asyncio.wait_for(reaping, _REAP_SECONDS)
        except TimeoutError:
            return None

    def _too_large(self, what: str) -> ApiError:
        return ApiError(
            400,
            f"{what} takes more than {self._limits.task_bytes} bytes of memory; ask for less",
            code="too_large",
        )

    async def _start(self) -> WorkerProcess:
        """Start a worker. If the caller gives up, the start goes on for the next one.

        Raises:
            ChildProcessError: it cannot be started, or not in time.
        """
        starting = self._unclaimed.pop() if self._unclaimed else asyncio.ensure_future(self._fork())
        try:
            await asyncio.wait({starting}, timeout=_LATE_SECONDS)
            if not starting.done():
                self.is_hung = True
                self._try_workers()
                await asyncio.wait({starting}, timeout=_START_SECONDS - _LATE_SECONDS)
            if not starting.done():
                raise ChildProcessError(f"a worker did not start within {_START_SECONDS:g} seconds")
        except BaseException:
            self._unclaimed.append(starting)
            starting.add_done_callback(self._keep_unclaimed)
            raise
        return starting.result()

    async def _fork(self) -> WorkerProcess:
        pid, own = await asyncio.to_thread(self._fork_on_thread)
        return WorkerProcess(pid, *await asyncio.open_connection(sock=own))

    def _fork_on_thread(self) -> tuple[int, socket.socket]:
        pid, own = self._zygote.fork(self._model, self._limits.task_bytes)
        if self._closed:  # the event loop may have ended
            own.close()
            self._zygote.end(pid)
            raise ChildProcessError("the pool was closed while a worker started")
        return pid, own

    def _keep_unclaimed(self, started: "asyncio.Future[WorkerProcess]") -> None:
        if started in self._unclaimed:
            self._unclaimed.remove(started)
            if not started.cancelled() and started.exception() is None:
                self._keep(started.result())

    def _has_answered(self) -> None:
        self._answered = time.monotonic()
        self.is_hung = False

    def _try_workers(self) -> None:
        """Find out whether new workers answer, unless that is being found out."""
        if not self._closed and (self._trying is None or self._trying.done()):
            self._trying = asyncio.ensure_future(self._try_until_answer())

    async def _try_until_answer(self) -> None:
        """Try a new worker, and others until one answers or another has answered a task."""
        while True:
            begun, worker = time.monotonic(), None
            try:
                worker = await self._start()
                async with asyncio.timeout(_TRIAL_SECONDS):
                    await worker.exchange(frames.pack({"task": "ping"}))
            except BaseException as error:
                if worker is not None:
                    self._end(worker)
                if not isinstance(error, asyncio.IncompleteReadError | OSError):
                    raise
            else:
                self._has_answered()
                self._keep(worker)
                return
            if self._answered > begun:
                return
            self.is_hung = True
            await asyncio.sleep(_TRIAL_SECONDS)

    def _pop_idle(self) -> WorkerProcess | None:
        """An idle worker that has not ended, or None."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:
                return worker
            _log.warning("worker %d ended while idle, as if killed", worker.pid)
            self._end(worker)
        return None

    def _keep(self, worker: WorkerProcess) -> None:
        if self._closed or len(self._idle) >= self._limits.quick:
            self._end(worker)
        else:
            self._idle.append(worker)

    def _end(self, worker: WorkerProcess) -> None:
        worker.disconnect()
        self._zygote.end(worker.pid)


async def _wait_running(
    reading: "asyncio.Future[Any]", worker: WorkerProcess, seconds: float
) -> None:
    """Wait at most ``seconds`` for a result, and check that the worker runs.

    Raises:
        WorkerLostError: it used no CPU time between two checks.
    """
    looks = max(1, int(seconds / _LOOK_SECONDS))
    for _ in range(looks):
        await asyncio.wait({reading}, timeout=seconds / looks)
        if reading.done():
            return
        if not worker.has_run():
            raise WorkerLostError(
                f"worker {worker.pid} used no CPU time for {seconds / looks:.3g} seconds, as if "
                "stopped,"
            )
