"""Compiles programs while the engine runs, on threads and in processes beside it."""

import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from tqdm.auto import tqdm

from rjax.batch.compile_progress import COMPILE_THREAD, CompileProgress
from rjax.worker.gil_sharing import quick_switches
from rjax.worker.programs.compile_process import CompileLane, CompileProcessEndedError

_MAX_THREADS = 8  # lowering holds the GIL and feeds no more compilers than this
_LENT_THREADS = 4  # that compile beside the processes while everything is waited for
_LINGER_SECONDS = 5.0  # of a lane without work, before it is given back
_LOOK_SECONDS = 0.5  # of a lane without work, between looks at the main thread
_BAR_SECONDS = 0.5  # of waiting, before a bar is shown
_log = logging.getLogger("rjax")


@dataclasses.dataclass(frozen=True, slots=True)
class CompileTask:
    """How a program is made.

    Attributes:
        lower: traces and lowers it.
        compile: compiles and keeps it. By default JAX keeps it with the jitted function.
        load: loads it from where another process kept it; returns whether it was there.
        beside: whether a process beside this one can compile it, by its key.
    """

    lower: Callable[[], jax.stages.Lowered]
    compile: Callable[[jax.stages.Lowered], object] = lambda lowered: lowered.compile()
    load: Callable[[], bool] = lambda: False
    beside: bool = False


class BackgroundCompiler:
    """Compiles programs in the order in which they are added; those that a step waits for first.

    A program that another process kept is loaded. Others are compiled by processes beside this one,
    if there are any, since a step waits for a compiler in its own process; threads of this process
    then compile only what is waited for. Without such processes, threads compile everything: one
    lowers at a time, since lowering is Python code, and the others are inside XLA; on a machine of
    few cores one core is left to the engine unless it waits. What a process fails to compile, a
    thread compiles, after a warning.

    Threads and processes end when nothing is left to compile, after `close`, and with the main
    thread; a program that a thread compiles is finished first, because XLA cannot be interrupted.

    Any thread may call the methods.

    Args:
        progress: show a progress bar in `wait`, and to a step that waits if there is a terminal.
        start_lanes: starts processes; called whenever there is something to compile and none runs.
    """

    def __init__(
        self,
        *,
        progress: bool = False,
        start_lanes: Callable[[], Sequence[CompileLane]] | None = None,
    ) -> None:
        self._progress = progress
        self._terminal_progress = progress and sys.stderr.isatty()
        self._num_cpus = os.cpu_count() or 1
        self._start_lanes = start_lanes
        self._changed = threading.Condition()  # its lock is re-entrant
        self._lowering = threading.Lock()
        self._queue: deque[Hashable] = deque()  # to load, or to compile on a thread
        self._beside: deque[Hashable] = deque()  # to compile in a process, or if it is waited for
        self._tasks: dict[Hashable, CompileTask] = {}  # of programs that are not compiled yet
        self._compiled: set[Hashable] = set()
        self._failed: dict[Hashable, Exception] = {}
        self._urgent: Sequence[Hashable] = ()
        self._threads = self._lanes = self._waiting = self._waiting_for_all = self._borrowed = 0
        self._left = 0.0  # when a program was last left to the processes
        self._closed = False
        self._waits: tuple[tuple[float, float], ...] = ()
        self._begun = time.perf_counter()

    def add(self, key: Hashable, task: CompileTask) -> None:
        """Compile a program after all that were added before. A key that is known already is
        ignored."""
        with self._changed:
            if self._closed or key in self._tasks or key in self._compiled:
                return
            self._tasks[key] = task
            self._queue.append(key)
            self._start_threads()

    def is_compiled(self, key: Hashable) -> bool:
        """Whether the program is there."""
        return key in self._compiled  # a set's lookup is atomic

    def first_compiled(self, sets: Sequence[Sequence[Hashable]]) -> int:
        """The index of the first set whose programs are all compiled; the best set comes first.

        If that is not the best one, what the best one lacks is compiled next. If none is compiled,
        waits for one; the set that lacks the fewest programs is compiled next. Sets with keys that
        were never added are not waited for.

        Raises:
            Exception: no set can be compiled; the error of the first.
        """
        if self._compiled.issuperset(sets[0]):
            return 0
        with (
            self._bar(
                "Compiling, once for this model",
                disable=not self._terminal_progress,
                delay=_BAR_SECONDS,
                leave=False,
            ) as bar,
            self._changed,
        ):
            while True:
                for index, keys in enumerate(sets):
                    if self._compiled.issuperset(keys):
                        self._put_first(sets[0])
                        return index
                expected = self._compiled | self._unfinished()
                pending = [keys for keys in sets if expected.issuperset(keys)]
                if self._closed or not pending:
                    failed = [self._failed[key] for key in sets[0] if key in self._failed]
                    raise failed[0] if failed else RuntimeError("the compiler is closed")
                self._put_first(min(pending, key=lambda keys: len(set(keys) - self._compiled)))
                bar.update(len(self._compiled) - bar.n)
                start = time.monotonic()
                self._wait()
                self._waits += ((start, time.monotonic()),)

    def hurry(self, keys: Sequence[Hashable]) -> bool:
        """Compile these programs next; return whether nothing is left to be done for them."""
        with self._changed:
            self._put_first(keys)
            return self._unfinished().isdisjoint(keys)

    def wait(self) -> None:
        """Wait until everything is compiled. An interrupt meanwhile closes the compiler.

        Raises:
            Exception: a program cannot be compiled; the error of the first.
        """
        with self._changed, self._bar("Compiling steps", disable=not self._progress) as bar:
            try:
                self._waiting_for_all += 1
                while not self._closed and self._unfinished():
                    self._wait()
                    bar.update(len(self._compiled) - bar.n)
            except BaseException:  # Ctrl-C: begin no further program
                self.close()
                raise
            finally:
                self._waiting_for_all -= 1
            for error in self._failed.values():
                raise error

    def progress(self) -> CompileProgress:
        """How far compilation is."""
        with self._changed:
            total = len(self._compiled) + len(self._tasks) - len(self._failed)
            return CompileProgress(
                len(self._compiled), total, self._waits, waiting=self._waiting > 0
            )

    def close(self) -> None:
        """Compile nothing more. Does not wait for programs that are being compiled."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._beside.clear()
            self._changed.notify_all()

    def _unfinished(self) -> set[Hashable]:
        """Programs that are compiled sooner or later."""
        return self._tasks.keys() - self._failed.keys()

    def _bar(self, title: str, **options: Any) -> tqdm:
        done = len(self._compiled)
        return tqdm(initial=done, total=done + len(self._tasks), desc=title, **options)

    def _wait(self) -> None:
        self._waiting += 1
        self._start_threads()
        try:
            # A progress bar shows the time too.
            self._changed.wait(_BAR_SECONDS if self._terminal_progress else None)
        finally:
            self._waiting -= 1

    def _most_threads(self) -> int:
        cpus = self._num_cpus if self._waiting else self._num_cpus - 1
        return max(1, min(_MAX_THREADS, cpus))

    def _start_threads(self) -> None:
        todo = len(self._queue) + self._borrowable()
        for _ in range(min(todo, self._most_threads() - self._threads)):
            self._threads += 1
            threading.Thread(target=self._run, name=COMPILE_THREAD).start()

    def _borrowable(self) -> int:
        """How many programs that were left to the processes a thread may compile."""
        if self._waiting_for_all:
            return max(0, min(len(self._beside), _LENT_THREADS - self._borrowed))
        return int(bool(self._waiting and self._beside and self._beside[0] in self._urgent))

    def _put_first(self, keys: Sequence[Hashable]) -> None:
        self._urgent = keys
        for queue in (self._queue, self._beside):
            for key in reversed(keys):
                if key in queue:
                    queue.remove(key)
                    queue.appendleft(key)

    def _run(self) -> None:
        while True:
            if not threading.main_thread().is_alive():
                self.close()
            with self._changed:
                borrows = not self._queue
                if self._threads > self._most_threads() or (borrows and not self._borrowable()):
                    self._threads -= 1
                    return
                key = (self._beside if borrows else self._queue).popleft()
                task = self._tasks[key]
                self._borrowed += borrows
            with quick_switches():
                self._make(key, task, may_leave=not borrows)
            del task
            with self._changed:
                self._borrowed -= borrows

    def _make(self, key: Hashable, task: CompileTask, *, may_leave: bool) -> None:
        """Load or compile a program; one that a process can compile is left to it."""
        error = None
        try:
            if not task.load():
                if may_leave and task.beside and self._leave(key):
                    return
                self._compile(task)
        except Exception as raised:
            _log.exception("a step could not be compiled")
            error = raised
        with self._changed:
            if error is None:
                del self._tasks[key]
                self._compiled.add(key)
            else:
                self._failed[key] = error
            if not self._closed and not self._unfinished():
                _log.info(
                    "compiled %d programs in the background in %.1f s",
                    len(self._compiled),
                    time.perf_counter() - self._begun,
                )
            self._changed.notify_all()

    def _compile(self, task: CompileTask) -> None:
        with self._lowering:
            lowered = task.lower()
        try:
            task.compile(lowered)
        except jax.errors.JaxRuntimeError:
            # Autotuning allocates device memory, of which programs compiled in parallel can leave
            # too little.
            with self._lowering:
                task.compile(lowered)

    # Processes

    def _leave(self, key: Hashable) -> bool:
        """Leave a program to the processes, and start them; return whether there are any."""
        with self._changed:
            if self._closed:
                return True
            if not self._lanes:
                self._start_processes()
            if not self._lanes:
                return False
            self._left = time.monotonic()
            if key in self._urgent:
                self._beside.appendleft(key)
            else:
                self._beside.append(key)
            self._start_threads()
            self._changed.notify_all()
            return True

    def _start_processes(self) -> None:
        try:
            lanes = self._start_lanes() if self._start_lanes is not None else ()
        except OSError as error:
            self._without_processes(str(error))
            return
        for lane in lanes:
            self._lanes += 1
            threading.Thread(target=self._run_lane, args=(lane,), name=COMPILE_THREAD).start()

    def _without_processes(self, reason: str) -> None:
        if self._start_lanes is not None:
            _log.warning(
                "programs are compiled in the engine's process, beside its steps: %s", reason
            )
            self._start_lanes = None

    def _run_lane(self, lane: CompileLane) -> None:
        key = None
        try:
            lane.wait_until_ready(self._is_wanted)
            while True:
                with lane.turn:
                    key = self._next_beside()
                    if key is None:
                        return
                    error = lane.lower(key, self._is_wanted)
                error = error or lane.wait_until_kept(self._is_wanted)
                if error is not None:
                    _log.warning("a program is compiled beside the engine's steps: %s", error)
                with quick_switches():  # load it, or compile it after all
                    self._make(key, self._tasks[key], may_leave=False)
        except CompileProcessEndedError as ended:
            with self._changed:
                if self._is_wanted():
                    if key is not None:
                        self._beside.appendleft(key)
                    self._without_processes(str(ended))
        finally:
            lane.close()
            with self._changed:
                self._lanes -= 1
                if not self._lanes and self._is_wanted():  # none is left for these
                    self._queue.extend(self._beside)
                    self._beside.clear()
                    self._start_threads()

    def _next_beside(self) -> Hashable | None:
        """The next program for a process; None if its lane is not needed any longer."""
        with self._changed:
            while not self._beside:
                if not self._is_wanted() or time.monotonic() > self._left + _LINGER_SECONDS:
                    return None
                self._changed.wait(_LOOK_SECONDS)
            return self._beside.popleft() if self._is_wanted() else None

    def _is_wanted(self) -> bool:
        return not self._closed and threading.main_thread().is_alive()
