"""Programs on a mesh of virtual CPU devices, whose number is fixed when a process starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_on_virtual_devices(program: str, devices: int) -> str:
    """What a Python program prints in a process of its own; it has to end without an error."""
    count = f" --xla_force_host_platform_device_count={devices}"
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + count, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout
