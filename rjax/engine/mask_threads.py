"""MaskThreads: advances slow token masks beside the engine's thread."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterable

from rjax.batch.sequence import Sequence
from rjax.batch.token_mask import TokenMask

_MOST_THREADS = 4
_IDLE_SECONDS = 10.0  # after which a thread ends
_QUICK_SECONDS = 0.005  # of a mask that hardly delays a step


class MaskThreads:
    """Threads that advance token masks whose ``may_be_slow`` is true.

    The engine posts the tokens that a step sampled, and before it samples the next step it waits
    for the masks of that step, but not for long: a sequence whose mask is late leaves the step and
    waits for its mask, while the others go on. Afterwards it is not scheduled before its mask is
    ready (`Sequence.waits_for_mask`), until several masks in a row were quick.

    All methods are for the engine's thread. The threads start with a mask and end when they have
    been idle for a while.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._posted = threading.Condition(lock)
        self._ready = threading.Condition(lock)
        self._jobs: deque[tuple[Sequence, TokenMask, int]] = deque()
        self._awaited: set[int] = set()  # ids of sequences
        self._failures: list[tuple[Sequence, Exception]] = []
        self._num_pending = 0
        self._num_threads = 0
        self._closed = False

    def post(self, sampled: list[tuple[Sequence, int]]) -> None:
        """Advance the masks of sequences by their tokens."""
        jobs: list[tuple[Sequence, TokenMask, int]] = []
        for sequence, token in sampled:
            assert sequence.mask is not None
            sequence.mask_pending = True
            jobs.append((sequence, sequence.mask, token))
        with self._posted:
            self._jobs.extend(jobs)
            self._num_pending += len(jobs)
            self._posted.notify(len(jobs))
            most = min(_MOST_THREADS, os.cpu_count() or 1, self._num_pending)
            missing = max(0, most - self._num_threads)
            self._num_threads += missing
        for _ in range(missing):
            threading.Thread(target=self._run, name="rjax-masks", daemon=True).start()

    def wait(self, sequences: Iterable[Sequence], seconds: float) -> None:
        """Wait until the masks of these sequences are ready, for at most ``seconds``."""
        with self._ready:
            self._awaited = {id(s) for s in sequences if s.mask_pending}
            self._ready.wait_for(lambda: not self._awaited, seconds)
            self._awaited = set()

    def wait_for_any(self, seconds: float) -> None:
        """Wait until a pending mask is ready, if there is one, for at most ``seconds``."""
        with self._ready:
            pending = self._num_pending
            self._ready.wait_for(lambda: not pending or self._num_pending < pending, seconds)

    def failures(self) -> list[tuple[Sequence, Exception]]:
        """The sequences whose masks have failed since the last call, with their errors."""
        with self._ready:
            found, self._failures = self._failures, []
        return found

    def close(self) -> None:
        """End the threads; masks that wait are not advanced."""
        with self._posted:
            self._closed = True
            self._jobs.clear()
            self._posted.notify_all()

    def _run(self) -> None:
        while True:
            with self._posted:
                self._posted.wait_for(lambda: self._jobs or self._closed, _IDLE_SECONDS)
                if self._closed or not self._jobs:
                    self._num_threads -= 1
                    return
            self._advance_next()

    def _advance_next(self) -> None:
        """Advance a mask; a function, so that a waiting thread holds no mask in memory."""
        try:
            sequence, mask, token = self._jobs.popleft()
        except IndexError:  # another thread has it
            return
        start, failure = time.monotonic(), None
        try:
            mask.accept(token)
        except Exception as error:
            failure = error
        seconds = time.monotonic() - start
        with self._ready:
            if failure is not None:
                self._failures.append((sequence, failure))
            sequence.take_mask(quick=seconds < _QUICK_SECONDS)
            self._num_pending -= 1
            self._awaited.discard(id(sequence))
            if not self._awaited:
                self._ready.notify_all()
