"""What a process beside the engine needs to compile its programs, as bytes."""

import dataclasses
import io
import json
import pathlib
import pickle
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from rjax.errors import InvalidConfigError
from rjax.models import ModelConfig
from rjax.worker.backend import Backend, choose_backend, compute_capability
from rjax.worker.compiled_programs import CompiledPrograms
from rjax.worker.lowering import ProgramArguments, ProgramLowering
from rjax.worker.program_identity import identity_parts, program_identity
from rjax.worker.program_store import ProgramStore
from rjax.worker.programs import StepPrograms
from rjax.worker.step_input import PackedLayouts

_MOST_NAMED = 10  # parts of an identity in an error


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSource:
    """Values by which the kernels of an engine are chosen again; functions are not serialised.

    Attributes:
        name: the attention backend's name.
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

    @classmethod
    def of(
        cls,
        backend: Backend,
        model: ModelConfig,
        *,
        dtype: DTypeLike,
        page_size: int,
        kv_dtype: DTypeLike,
    ) -> "KernelSource":
        """The source of kernels that are chosen already, from these arguments."""
        considered = tuple(kernel.name for kernel in backend.dispatcher.kernels)
        return cls(backend.dispatcher.backend, model, dtype, page_size, kv_dtype, considered)

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
        identity: parts of the programs' identity, from `identity_parts`.
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
        mesh, given = self.arguments.mesh, self.arguments
        backend = self.kernels.choose(mesh)
        shapes = given.leaves, given.state, given.num_decode_steps
        own = identity_parts(self.graph, backend, mesh, shapes) or {}
        if own != self.identity:
            other = sorted(dict(own.items() ^ self.identity.items()))
            shown = ", ".join(other[:_MOST_NAMED])
            raise InvalidConfigError(f"a process of its own differs in {shown}")
        programs = StepPrograms(self.graph, self.treedef, backend, mesh, PackedLayouts())
        lowering = ProgramLowering(programs, given)
        store = ProgramStore(self.folder, program_identity(self.identity), mesh)
        return CompiledPrograms(lowering, store)


class _Pickler(pickle.Pickler):
    """Writes a device as its id."""

    def persistent_id(self, obj: Any) -> int | None:
        return obj.id if isinstance(obj, jax.Device) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: int) -> Any:
        return next(device for device in jax.devices() if device.id == pid)
