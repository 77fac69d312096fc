"""Sizes of memory: what users write, and what the host has."""

import os
import pathlib
import re
import resource

from rjax.errors import InvalidConfigError

GIB = 2**30
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BY_LOWER = {name.lower(): size for name, size in _UNITS.items()}
_WRITTEN = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_STATM = pathlib.Path("/proc/self/statm")  # pages: total, resident, shared, text, 0, data, 0
_CGROUP_LIMITS = (
    pathlib.Path("/sys/fs/cgroup/memory.max"),
    pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def parse_size(name: str, value: object) -> int:
    """Bytes of a size of host memory.

    Args:
        name: name of the setting, for errors.
        value: a number of GiB, or a text such as "4", "4GiB", "512 MiB" or "4GB".

    Raises:
        InvalidConfigError: no size, or more than the host has.
    """
    size = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = value * GIB
    elif isinstance(value, str) and (found := _WRITTEN.fullmatch(value)):
        unit = _BY_LOWER.get(found[2].lower() or "gib")
        size = None if unit is None else float(found[1]) * unit
    most = host_memory()
    if size is None or not 0 <= size <= most:  # NaN is not either
        raise InvalidConfigError(
            f"{name} is {value!r}; give a number of GiB, or a text such as '4GiB' or '512MiB' "
            f"(units: {', '.join(_UNITS)}), from 0 to the {most / GIB:.1f} GiB of this host"
        )
    return int(size)


def host_memory() -> int:
    """Bytes of memory that this host has, or that the process's container or the process itself
    (``ulimit -v``, ``ulimit -d``) may take."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    limits += [limit for limit, _ in _process_limits()]
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # none of this kind, or "max"
            continue
    return min(limits)


def available_memory() -> int:
    """Bytes of host memory that can be taken now without swapping, within the limits of this
    process; files that the system keeps in memory give way."""
    left = [max(0, limit - used) for limit, used in _process_limits()]
    return min([_available_on_host(), *left])


def _available_on_host() -> int:
    try:
        for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _process_limits() -> list[tuple[int, int]]:
    """(limit, used) bytes of address space and of private memory, where they are limited."""
    found = []
    for kind, field in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY and _STATM.exists():
            used = int(_STATM.read_text().split()[field]) * resource.getpagesize()
            found.append((limit, used))
    return found
