"""Memory use and memory limits of a process."""

import ctypes
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_M_ARENA_MAX = -8  # of glibc's malloc.h
_ARENAS = 2
TRIM_SECONDS = 30.0
_STATM = Path("/proc/self/statm")  # pages: total, resident, shared, text, 0, data, 0


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    return _pages(1) * resource.getpagesize()


def bound_memory(more: int) -> None:
    """Limit this process to ``more`` bytes above its present memory, or to what the operator's
    limit leaves; allocations beyond fail.

    Only Linux counts all private memory as data (``RLIMIT_DATA``); elsewhere there is no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        most = _pages(5) * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def share_arenas() -> None:
    """Let all threads of this process allocate from two arenas of glibc's malloc.

    By default nearly every thread has one of its own, and each keeps what its largest answers
    took. Threads that hold Python's lock anyway gain nothing by them. Call it before threads start;
    other C libraries have no such arenas.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)


def keep_trimmed() -> None:
    """Return the pages that glibc's malloc holds free to the system, every ``TRIM_SECONDS``, from a
    thread of its own.

    glibc itself returns only free memory at the end of an arena, so that memory of large bodies and
    answers stays with the process. A trim takes about 10 ms for a gigabyte, and locks one arena at
    a time.
    """
    malloc_trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    )
    if malloc_trim is not None:
        threading.Thread(target=_trim, args=(malloc_trim,), name="rjax-trim", daemon=True).start()


def _trim(malloc_trim: Callable[[int], int]) -> None:
    while True:
        time.sleep(TRIM_SECONDS)
        malloc_trim(0)


def _pages(field: int) -> int:
    return int(_STATM.read_text().split()[field]) if _STATM.exists() else 0
