"""Result files: one JSON format for all benchmarks, with everything needed to repeat them."""

import datetime
import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_NOT_SETTINGS = (
    "json",
    "png",
    "quiet",
    "data",
    "file",
    "predictions",
    "log",
)  # options that do not change the result
_OF_THIS_MACHINE = (
    "--api-key",
    "--torch-python",
    "--python",
    "--out",
    "--data",
    "--folder",
    "--log",
    "--file",
    "--json",
    "--predictions",
    "--plugin",
    "--ptxas",
    "--nvdisasm",
    "--ptx",
)
_PACKAGES = ("jax", "jaxlib", "flax", "transformers", "torch", "triton")


def environment() -> dict[str, Any]:
    """Device and versions of a run."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "devices": jax.device_count(),
        "gpu_driver": _gpu_driver(),
        "driver": getattr(device.client, "platform_version", "").splitlines()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "date": datetime.date.today().isoformat(),
    }


def command(name: str) -> str:
    """The command line that repeats the run, without paths of this machine.

    Args:
        name: a module such as "bench.swap", or a command such as "rjax bench latency".
    """
    words = name.split()
    given = list(sys.argv[1:])
    for own in (words[1:], words[2:]):  # the command's own words
        if own and given[: len(own)] == own:
            del given[: len(own)]
            break
    for option in _OF_THIS_MACHINE:
        if option in given:
            at = given.index(option)
            del given[at : at + 2]
    own = tuple(f"{option}=" for option in _OF_THIS_MACHINE)
    given = [x for x in given if not x.startswith(own)]
    start = words if len(words) > 1 else ["python", "-m", name]
    return shlex.join([*start, *given])


def record(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    **more: Any,
) -> dict[str, Any]:
    """A result; ``rows`` has one mapping for each measured point, and ``name`` is that of
    `command`."""
    return {
        "benchmark": name,
        "command": command(name),
        "environment": environment(),
        "settings": {k: _plain(v) for k, v in settings.items() if k not in _NOT_SETTINGS},
        **more,
        "rows": [dict(row) for row in rows],
    }


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Write a record; create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: the file is not a record of these benchmarks.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    missing = {"benchmark", "command", "environment", "rows"} - set(found)
    if missing:
        raise ValueError(f"{path} is no benchmark record: it lacks {', '.join(sorted(missing))}")
    return found


def _gpu_driver() -> str | None:
    """Version of NVIDIA's kernel module."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text("utf-8")
    except OSError:
        return None
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return None if found is None else found[1]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    return str(value)
