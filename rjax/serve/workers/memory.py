"""A process' memory: what it uses, and a bound on it."""

import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")  # pages: total, resident, shared, text, 0, data, 0


def resident_bytes() -> int:
    """Memory that this process uses now, in bytes; 0 where the system does not say."""
    return _pages(1) * resource.getpagesize()


def bound_memory(more: int) -> None:
    """Let this process take at most so many bytes more; then it fails to allocate.

    Only Linux counts all of a process' own memory as its data; elsewhere this bounds nothing.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        most = _pages(5) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _pages(field: int) -> int:
    return int(_STATM.read_text().split()[field]) if _STATM.exists() else 0
