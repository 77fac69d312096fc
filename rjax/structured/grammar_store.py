"""GrammarStore: bounds the memory of compiled grammars, those in use and those that are cached."""

import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Protocol, runtime_checkable

_CACHE_SIZE = 128  # compiled constraints
_STATM = Path("/proc/self/statm")  # pages: total, resident, ...


@runtime_checkable
class StoredGrammar(Protocol):
    """The part of a `rjax.structured.compiled_grammar.CompiledGrammar` that the store reads."""

    num_bytes: int
    failure: str | None

    @property
    def shared(self) -> bool:
        """Whether later requests may use it too."""
        ...


class GrammarStore[G: StoredGrammar]:
    """Caches grammars by owner and constraint, and counts all that are alive; thread-safe.

    A cached grammar is dropped when it may not be shared any more, when it has not been used for
    some time, and when the cache is full. Where all grammars that are alive take too much memory,
    the largest get a ``failure``, on which their masks end.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._cache_size, self._cache_bytes = _CACHE_SIZE, math.inf
        self._total_bytes, self._idle_seconds = math.inf, math.inf
        self._kept: OrderedDict[Hashable, tuple[G, float]] = OrderedDict()  # with time of last use
        self._alive: weakref.WeakSet[G] = weakref.WeakSet()
        self._timer: threading.Timer | None = None
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC) if _STATM.exists() else None
        if self._statm is not None:
            weakref.finalize(self, os.close, self._statm)
        self._resident = self._read_resident()

    def limit(self, size: int, num_bytes: float, total_bytes: float, idle_seconds: float) -> None:
        """Set the bounds; see `rjax.structured.compiler.GrammarCompiler.limit_cache`."""
        with self._lock:
            self._cache_size, self._cache_bytes = size, num_bytes
            self._total_bytes, self._idle_seconds = total_bytes, idle_seconds
            self.check()

    def get(self, key: Hashable) -> G | None:
        """The cached grammar of this key."""
        with self._lock:
            self.check()
            grammar, _ = self._kept.get(key, (None, 0.0))
            if grammar is not None:
                self._kept[key] = grammar, time.monotonic()
                self._kept.move_to_end(key)
            return grammar

    def add(self, key: Hashable, grammar: G) -> None:
        """Count a new grammar while it is alive, and cache it if it may be shared."""
        with self._lock:
            self._alive.add(grammar)
            if grammar.shared:
                self._kept[key] = grammar, time.monotonic()
                self._kept.move_to_end(key)
            self.check()

    def check(self) -> None:
        """Drop the grammars that may not stay in the cache, and end the largest if all are too
        large."""
        with self._lock:
            oldest = time.monotonic() - self._idle_seconds
            for key, (grammar, used) in list(self._kept.items()):
                if used <= oldest or not grammar.shared:
                    del self._kept[key]
            kept = sum([grammar.num_bytes for grammar, _ in self._kept.values()])
            while self._kept and (len(self._kept) > self._cache_size or kept > self._cache_bytes):
                _, (grammar, _) = self._kept.popitem(last=False)
                kept -= grammar.num_bytes
            if self._kept and self._timer is None and self._idle_seconds < math.inf:
                self._timer = threading.Timer(self._idle_seconds, _look_again, [weakref.ref(self)])
                self._timer.daemon = True
                self._timer.start()
            self._end_largest()

    def _end_largest(self) -> None:
        alive = [grammar for grammar in self._alive if grammar.failure is None]
        total = sum([grammar.num_bytes for grammar in alive])
        if total <= self._total_bytes:
            return
        for grammar in sorted(alive, key=lambda grammar: grammar.num_bytes, reverse=True):
            grammar.failure = (
                f"the grammar takes {grammar.num_bytes / 2**20:.0f} MiB of memory, and all "
                f"grammars together may take {self._total_bytes / 2**20:.0f} MiB"
            )
            total -= grammar.num_bytes
            if total <= self._total_bytes:
                return

    def growth(self) -> int:
        """Growth of the process's resident memory in bytes since this was last called; 0 if the
        system does not report it."""
        before, self._resident = self._resident, self._read_resident()
        return self._resident - before

    def _read_resident(self) -> int:
        if self._statm is None:
            return 0
        return int(os.pread(self._statm, 64, 0).split()[1]) * self._page

    def timer_ended(self) -> None:
        """Look for idle grammars; called by the timer."""
        with self._lock:
            self._timer = None
            self.check()


def _look_again(store: weakref.ref[GrammarStore]) -> None:
    if (found := store()) is not None:
        found.timer_ended()
