"""One measurement of bench.load_weights, as a process of its own: its argument is a JSON file."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_CHUNK = 1 << 30  # bytes of a copy to the device


def read_files(task: dict[str, Any]) -> dict[str, Any]:
    """Read all files into memory, one after another."""
    import numpy as np

    sizes = [Path(file).stat().st_size for file in task["files"]]
    memory = np.zeros(max(sizes), np.uint8)
    memory.fill(1)  # no page fault is measured
    start = time.perf_counter()
    for file, size in zip(task["files"], sizes, strict=True):
        with open(file, "rb", buffering=0) as opened:
            view = memoryview(memory)[:size]
            while view:
                view = view[opened.readinto(view) :]
    return {"seconds": time.perf_counter() - start, "bytes": sum(sizes)}


def load_model(task: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint to the devices."""
    import jax
    import jax.numpy as jnp

    from bench.startup.side import CompilerTimes
    from rjax.models import load_model

    compiler = CompilerTimes(jax.monitoring)
    jax.block_until_ready(jax.device_put(jnp.zeros(8)))  # the device is ready
    before = _seconds(compiler.totals)
    start = time.perf_counter()
    loaded = load_model(task["folder"], dtype=jnp.bfloat16, progress=not task["quiet"])
    leaves = jax.block_until_ready(jax.tree.leaves(loaded.model))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "compile_s": _seconds(compiler.totals) - before,
        "bytes": sum(leaf.nbytes for leaf in leaves),
    }


def _seconds(totals: Mapping[str, float]) -> float:
    return sum(value for name, value in totals.items() if name.endswith("_s"))


def copy_to_device(task: dict[str, Any]) -> dict[str, Any]:
    """Copy as many bytes as the checkpoint has from host memory to one device."""
    import jax
    import numpy as np

    total = sum(Path(file).stat().st_size for file in task["files"])
    host = np.zeros(min(total, _CHUNK), np.uint8)
    host.fill(1)
    device = jax.devices()[0]
    jax.device_put(host, device, may_alias=False).block_until_ready()
    left, start = total, time.perf_counter()
    while left:
        size = min(left, len(host))
        jax.device_put(host[:size], device, may_alias=False).block_until_ready()
        left -= size
    return {"seconds": time.perf_counter() - start, "bytes": total}


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "read the files": read_files,
    "load_model": load_model,
    "host to device copy": copy_to_device,
}


def drop_page_cache(files: list[str]) -> None:
    """Ask the kernel to forget its copies of the files; it may keep some."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def main() -> None:
    """Measure one task of `TASKS` and write the result."""
    task = json.loads(Path(sys.argv[1]).read_text())
    if task["page_cache"] == "cold":
        drop_page_cache(task["files"])
    Path(task["out"]).write_text(json.dumps(TASKS[task["what"]](task)))


if __name__ == "__main__":
    main()
