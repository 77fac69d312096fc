"""Memory use and memory limit of a process."""

import resource
import sys
from pathlib import Path

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


def _pages(field: int) -> int:
    return int(_STATM.read_text().split()[field]) if _STATM.exists() else 0
