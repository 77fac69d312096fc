"""Compiles programs on threads while the engine runs."""

import dataclasses
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NoReturn

import jax
from tqdm.auto import tqdm

from rjax.batch.compile_progress import COMPILE_THREAD, CompileProgress
from rjax.worker.gil_sharing import quick_switches

_MAX_THREADS = 8  # lowering holds the GIL and feeds no more compilers than this
_BAR_SECONDS = 0.5  # of waiting, before a bar is shown
_log = logging.getLogger("rjax")


@dataclasses.dataclass(frozen=True, slots=True)
class CompileTask:
    """How a program is made.

    Attributes:
        lower: traces and lowers it.
        compile: compiles and keeps it. By default JAX keeps it with the jitted function.
        load: takes it from where an earlier process kept it; whether it was there.
    """

    lower: Callable[[], jax.stages.Lowered]
    compile: Callable[[jax.stages.Lowered], object] = lambda lowered: lowered.compile()
    load: Callable[[], bool] = lambda: False


class BackgroundCompiler:
    """Compiles programs in the order in which they are added; those that a step waits for first.

    One thread lowers at a time, since lowering is Python code; the others are inside XLA. On a
    machine of few cores one core is left to the engine unless it waits. The threads end when
    nothing is left to compile, after `close`, and with the main thread; a program that is being
    compiled is finished first, because XLA cannot be interrupted.

    Any thread may call the methods.

    Args:
        progress: show a progress bar to who waits for a program, in a terminal.
    """

    def __init__(self, *, progress: bool = False) -> None:
        self._progress = progress and sys.stderr.isatty()
        self._num_cpus = os.cpu_count() or 1
        self._changed = threading.Condition()  # its lock is re-entrant
        self._lowering = threading.Lock()
        self._queue: deque[Hashable] = deque()
        self._tasks: dict[Hashable, CompileTask] = {}  # of programs that are not compiled yet
        self._compiled: set[Hashable] = set()
        self._failed: dict[Hashable, Exception] = {}
        self._threads = self._waiting = 0
        self._closed = False
        self._waited = 0.0
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

    def first_compiled(self, keys: Sequence[Hashable]) -> int:
        """The index of the first key whose program is compiled; the best program comes first.

        If that is not the best one, the best is compiled next. If none is compiled, waits for one.
        Keys that were never added are not waited for.

        Raises:
            Exception: no program can be compiled; the error of the first.
        """
        if keys[0] in self._compiled:
            return 0
        start = time.perf_counter()
        with self._bar("Compiling, once for this model") as bar, self._changed:
            self._put_first(keys[0])
            while True:
                for index, key in enumerate(keys):
                    if key in self._compiled:
                        self._waited += time.perf_counter() - start
                        return index
                if self._closed or not any(map(self._is_pending, keys)):
                    raise self._failed.get(keys[0]) or RuntimeError("the compiler is closed")
                bar.update(len(self._compiled) - bar.n)
                self._wait()

    def wait(self, *, title: str, progress: bool) -> None:
        """Wait until everything is compiled. An interrupt meanwhile closes the compiler.

        Args:
            title: of the progress bar.
            progress: show a progress bar.

        Raises:
            Exception: a program cannot be compiled; the error of the first.
        """
        with (
            self._changed,
            tqdm(
                initial=len(self._compiled),
                total=len(self._compiled) + len(self._tasks),
                desc=title,
                disable=not progress,
            ) as bar,
        ):
            try:
                while not self._closed and any(map(self._is_pending, self._tasks)):
                    self._wait()
                    bar.update(len(self._compiled) - bar.n)
            except BaseException:  # Ctrl-C: begin no further program
                self.close()
                raise
            for error in self._failed.values():
                raise error

    def progress(self) -> CompileProgress:
        """How far it is."""
        with self._changed:
            total = len(self._compiled) + len(self._tasks) - len(self._failed)
            return CompileProgress(
                len(self._compiled), total, self._waited, waiting=self._waiting > 0
            )

    def close(self) -> None:
        """Compile nothing more. Does not wait for programs that are being compiled."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _is_pending(self, key: Hashable) -> bool:
        return key in self._tasks and key not in self._failed

    def _bar(self, title: str) -> "tqdm[NoReturn]":
        total = len(self._compiled) + len(self._tasks)
        return tqdm(
            total=total,
            initial=len(self._compiled),
            desc=title,
            delay=_BAR_SECONDS,
            leave=False,
            disable=not self._progress,
        )

    def _wait(self) -> None:
        self._waiting += 1
        self._start_threads()
        try:
            # A progress bar shows the time too.
            self._changed.wait(_BAR_SECONDS if self._progress else None)
        finally:
            self._waiting -= 1

    def _most_threads(self) -> int:
        cpus = self._num_cpus if self._waiting else self._num_cpus - 1
        return max(1, min(_MAX_THREADS, cpus))

    def _start_threads(self) -> None:
        for _ in range(min(len(self._queue), self._most_threads() - self._threads)):
            self._threads += 1
            threading.Thread(target=self._run, name=COMPILE_THREAD).start()

    def _put_first(self, key: Hashable) -> None:
        if key in self._queue:
            self._queue.remove(key)
            self._queue.appendleft(key)

    def _run(self) -> None:
        while True:
            if not threading.main_thread().is_alive():
                self.close()
            with self._changed:
                if not self._queue or self._threads > self._most_threads():
                    self._threads -= 1
                    return
                key = self._queue.popleft()
                task = self._tasks[key]
            with quick_switches():
                error = self._make(task)
            del task
            with self._changed:
                if error is None:
                    del self._tasks[key]
                    self._compiled.add(key)
                else:
                    self._failed[key] = error
                if not self._queue and self._threads == 1 and not self._closed:
                    self._log_end()
                self._changed.notify_all()

    def _make(self, task: CompileTask) -> Exception | None:
        try:
            if not task.load():
                self._compile(task)
        except Exception as error:
            _log.exception("a step could not be compiled")
            return error
        return None

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

    def _log_end(self) -> None:
        _log.info(
            "compiled %d programs in the background in %.1f s",
            len(self._compiled),
            time.perf_counter() - self._begun,
        )
