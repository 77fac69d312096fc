"""What the compiled programs of an engine depend on."""

import functools
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import flax
import jax
from flax import nnx
from jax._src import config as jax_config
from jax.sharding import Mesh
from jaxlib import xla_client

from rjax.models.schemes import WeightScheme
from rjax.worker.backend import Backend
from rjax.worker.kernels.kernel import registered_kernels

_FOLDER = pathlib.Path(__file__).parents[1]
_VARIABLES = ("XLA_", "JAX_", "MOSAIC_", "TRITON_")  # of the environment, that reach the compiler
_MEMORY_VARIABLES = "XLA_PYTHON_CLIENT_"  # of the allocator, which do not
_NEUTRAL_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_dump")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def identity_parts(
    graph: nnx.GraphDef[Any], backend: Backend, mesh: Mesh, arguments: Any
) -> dict[str, str] | None:
    """SHA-256 hex digests, by name, of everything but the `ProgramKey` that decides what a program
    computes.

    They cover the source of this package, the versions and settings of JAX and XLA, the devices,
    the structure of the model, and the shapes of the arguments. It is None for a
    model, a weight scheme or kernels from outside this package, whose source is not known, and
    inside a context that changes JAX's settings in this thread alone, such as
    ``jax.default_matmul_precision``.

    Args:
        graph: the model's graph definition.
        backend: kernels of the steps.
        mesh: devices of the steps.
        arguments: shapes, dtypes and shardings of weights and state, and numbers that decide code.
    """
    values = [getattr(attribute, "value", None) for _, attribute in graph.attributes]
    kinds = {getattr(node, "type", type(node)) for node in graph.nodes}
    kinds |= {type(value) for value in values if isinstance(value, WeightScheme)}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    if registered_kernels() or packages - {"rjax", "flax"}:
        return None
    # Which states it has depends on the modules of JAX that are imported. Those of the process are
    # among ``jax.config.values``.
    with ThreadPoolExecutor(1) as other_thread:
        if other_thread.submit(_trace_settings).result() != _trace_settings():
            return None
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_MEMORY_VARIABLES)
    }
    configured = {
        name: str(value)
        for name, value in jax.config.values.items()
        if not name.startswith(_NEUTRAL_SETTINGS)
    }
    parts = {
        "source": _source_digest(),
        "versions": (jax.__version__, version("jaxlib"), flax.__version__),
        "devices": (_devices(mesh), mesh),
        **dict(sorted(variables.items())),
        **dict(sorted(configured.items())),
        "model": graph,
        "kernels": (
            backend.name,
            backend.tuning,
            backend.streamed_rows,
        ),
        "considered kernels": [
            backend.dispatcher.backend,
            *(kernel.name for kernel in backend.dispatcher.kernels),
        ],
        "arguments": jax.tree_util.tree_leaves_with_path(arguments),
    }
    return {name: _digest(repr(part)) for name, part in parts.items()}


def program_identity(parts: Mapping[str, str]) -> str:
    """A SHA-256 hex digest of `identity_parts`."""
    return _digest(repr(sorted(parts.items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _trace_settings() -> str:
    return _ADDRESS.sub("", repr(jax_config.trace_context()))


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    # In a checkout, the folders of the models and of the kernels are links.
    walk = os.walk(_FOLDER, followlinks=True)
    files = [pathlib.Path(folder, name) for folder, _, names in walk for name in names]
    for file in sorted(file for file in files if file.suffix == ".py"):
        digest.update(f"{file.relative_to(_FOLDER)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _devices(mesh: Mesh) -> tuple[Any, ...]:
    """Names, driver and compiler versions, and the instructions of a CPU."""
    devices = list(mesh.devices.flat)
    kinds = [(device.device_kind, device.id) for device in devices]
    try:
        topology = xla_client.get_topology_for_devices(devices).fingerprint()
    except jax.errors.JaxRuntimeError:  # a platform without it
        topology = None
    return kinds, devices[0].client.platform_version, topology
