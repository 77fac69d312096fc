"""What the compiled programs of an engine depend on."""

import functools
import hashlib
import os
import pathlib
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import flax
import jax
from flax import nnx
from jax._src import config as jax_config
from jax.sharding import Mesh
from jaxlib import xla_client

from rjax.worker.backend import Backend
from rjax.worker.kernels.kernel import registered_kernels

_FOLDER = pathlib.Path(__file__).parents[1]
_VARIABLES = ("XLA_", "JAX_", "MOSAIC_", "TRITON_")  # of the environment, that reach the compiler
_MEMORY_VARIABLES = "XLA_PYTHON_CLIENT_"  # of the allocator, which do not
_NEUTRAL_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_dump")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def program_identity(
    graph: nnx.GraphDef[Any], backend: Backend, mesh: Mesh, arguments: Any
) -> str | None:
    """A SHA-256 hex digest of everything but the `ProgramKey` that decides what a program computes.

    It covers the source of this package, the versions and settings of JAX and XLA, the devices, the
    structure of the model, and the shapes of the arguments. It is None for a model or for kernels
    from outside this package, whose source is not known, and inside a context that changes JAX's
    settings in this thread alone, such as ``jax.default_matmul_precision``.

    Args:
        graph: of the model.
        backend: kernels of the steps.
        mesh: devices of the steps.
        arguments: shapes, dtypes and shardings of weights and state, and numbers that decide code.
    """
    kinds = {getattr(node, "type", type(node)) for node in graph.nodes}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    if registered_kernels() or packages - {"rjax", "flax"}:
        return None
    settings = _trace_settings()
    with ThreadPoolExecutor(1) as other_thread:
        if other_thread.submit(_trace_settings).result() != settings:
            return None
    parts = (
        _source_digest(),
        jax.__version__,
        version("jaxlib"),
        flax.__version__,
        _devices(mesh),
        mesh,
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name.startswith(_VARIABLES) and not name.startswith(_MEMORY_VARIABLES)
        ),
        sorted(
            (name, str(value))
            for name, value in jax.config.values.items()
            if not name.startswith(_NEUTRAL_SETTINGS)
        ),
        settings,
        graph,
        (backend.name, backend.tuning, backend.streamed_rows, backend.dispatcher.backend),
        [kernel.name for kernel in backend.dispatcher.kernels],
        jax.tree_util.tree_leaves_with_path(arguments),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


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
