"""What the programs of an engine depend on.

`program_identity` digests it for the `ProgramStore`; `ProgramSource` serialises it for a process
beside the engine.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import flax
import jax
from flax import nnx
from jax._src import config as jax_config
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxlib import xla_client

from rjax.errors import InvalidConfigError
from rjax.models import ModelConfig
from rjax.models.schemes import WeightScheme
from rjax.pallas_kernels.kernel import registered_kernels
from rjax.worker.backend import Backend, choose_backend, compute_capability
from rjax.worker.programs.cache import CompiledPrograms, ProgramStore
from rjax.worker.programs.keys import ProgramArguments, StepPrograms
from rjax.worker.step.layout import PackedLayouts

_PACKAGE = pathlib.Path(__file__).parents[2]
_VARIABLES = ("XLA_", "JAX_", "MOSAIC_", "TRITON_")  # of the environment, that reach the compiler
_MEMORY_VARIABLES = "XLA_PYTHON_CLIENT_"  # of the allocator, which do not
_NEUTRAL_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_dump")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_NAMED = 10  # parts of an identity in an error


def program_identity(
    graph: nnx.GraphDef[Any], backend: Backend, arguments: ProgramArguments
) -> dict[str, str] | None:
    """SHA-256 hex digests, by name, of everything but the `ProgramKey` that decides what a program
    computes.

    They cover the source of this package, the versions and settings of JAX and XLA, the devices,
    the structure of the model, and the shapes of the arguments. The identity is None for a model, a
    weight scheme or kernels from outside this package, whose source is not known, and inside a
    context that changes JAX's settings in this thread alone, such as
    ``jax.default_matmul_precision``.

    Args:
        graph: the model's graph definition.
        backend: kernels of the steps.
        arguments: shapes and shardings of the programs' arguments.
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
    shapes = arguments.leaves, arguments.state, arguments.num_decode_steps
    parts = {
        "source": _source_digest(),
        "versions": (jax.__version__, version("jaxlib"), flax.__version__),
        "devices": (_devices(arguments.mesh), arguments.mesh),
        **variables,
        **configured,
        "model": graph,
        "kernels": (backend.name, backend.tuning, backend.tunings, backend.streamed_rows),
        "considered kernels": [
            backend.dispatcher.backend,
            *(kernel.name for kernel in backend.dispatcher.kernels),
        ],
        "arguments": jax.tree_util.tree_leaves_with_path(shapes),
    }
    return {
        name: hashlib.sha256(repr(part).encode()).hexdigest()
        for name, part in sorted(parts.items())
    }


def _trace_settings() -> str:
    return _ADDRESS.sub("", repr(jax_config.trace_context()))


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    # In a checkout, the folders of the models and of the kernels are links.
    walk = os.walk(_PACKAGE, followlinks=True)
    files = [pathlib.Path(folder, name) for folder, _, names in walk for name in names]
    for file in sorted(file for file in files if file.suffix == ".py"):
        digest.update(f"{file.relative_to(_PACKAGE)}\0".encode())
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


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSource:
    """Values by which the kernels of an engine are chosen again; functions are not serialised.

    Attributes:
        name: the backend by which the dispatcher was made, "auto" or a name.
        model: its shapes decide which kernels can run.
        dtype: dtype of the weights.
        page_size: tokens a page.
        kv_dtype: dtype of the KV.
        considered: names of the kernels that the dispatcher considers.
    """

    name: str
    model: ModelConfig
    dtype: DTypeLike
    page_size: int
    kv_dtype: DTypeLike
    considered: tuple[str, ...]

    def choose(self, mesh: Mesh) -> Backend:
        """The kernels, for these devices."""
        device = mesh.devices.flat[0]
        backend = choose_backend(
            self.name,
            platform=device.platform,
            compute_capability=compute_capability(device),
            model=self.model,
            dtype=self.dtype,
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            devices=mesh.size,
        )
        dispatcher = backend.dispatcher
        for kernel in dispatcher.kernels:
            if kernel.name not in self.considered:
                dispatcher = dispatcher.without(kernel.name)
        return dataclasses.replace(backend, dispatcher=dispatcher)


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramSource:
    """Values from which the programs of an engine are lowered and compiled. It holds no array.

    Attributes:
        identity: the programs' `program_identity`.
        folder: directory of the `ProgramStore` that keeps the programs.
        graph, treedef: the model's graph definition and the tree structure of its parameters.
        arguments: shapes and shardings of the programs' arguments.
        kernels: source of the steps' kernels.
    """

    identity: dict[str, str]
    folder: pathlib.Path
    graph: Any
    treedef: Any
    arguments: ProgramArguments
    kernels: KernelSource

    def dumps(self) -> bytes:
        """Serialise for `loads`, with the settings of JAX in this process."""
        settings = {
            name: value
            for name, value in jax.config.values.items()
            if isinstance(value, bool | int | float | str | None)
        }
        file = io.BytesIO()
        file.write(json.dumps(settings).encode() + b"\n")
        _Pickler(file).dump(self)
        return file.getvalue()

    @classmethod
    def loads(cls, data: bytes) -> "ProgramSource":
        """Read what `dumps` wrote, in a process with the same devices.

        The process gets the settings of JAX before it asks for the devices.
        """
        file = io.BytesIO(data)
        for name, value in json.loads(file.readline()).items():
            if jax.config.values.get(name) != value:
                jax.config.update(name, value)
        return _Unpickler(file).load()

    def programs(self) -> CompiledPrograms:
        """The programs, kept in the store.

        Raises:
            InvalidConfigError: this process would make other programs, as under other settings of
                JAX.
        """
        mesh = self.arguments.mesh
        backend = self.kernels.choose(mesh)
        own = program_identity(self.graph, backend, self.arguments) or {}
        if own != self.identity:
            other = sorted(dict(own.items() ^ self.identity.items()))
            shown = ", ".join(other[:_MOST_NAMED])
            raise InvalidConfigError(f"a process of its own differs in {shown}")
        programs = StepPrograms(self.graph, self.treedef, backend, mesh, PackedLayouts())
        store = ProgramStore(self.folder, self.identity, mesh)
        return CompiledPrograms(programs, self.arguments, store)


class _Pickler(pickle.Pickler):
    """Writes a device as its id."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj.id if isinstance(obj, jax.Device) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: int) -> Any:
        return next(device for device in jax.devices() if device.id == pid)
