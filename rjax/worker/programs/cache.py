"""Compiled programs, in memory and on disk: a second start compiles no program again.

A `ProgramStore` keeps the programs of steps. JAX's persistent compilation cache keeps all others.
"""

import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import pickle
import tempfile
import threading
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import compilation_cache as cache_reader
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.extend.mlir import ir
from jax.sharding import Mesh

from rjax.pallas_kernels.kernel import HOPPER
from rjax.worker.backend import compute_capability
from rjax.worker.programs.keys import ProgramArguments, ProgramKey, StepPrograms
from rjax.worker.trusted_files import distrust

_MIN_COMPILE_SECONDS = 0.2  # of a program that JAX's cache keeps
_MAX_BYTES = 8 * 2**30  # of a store
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = "mosaic_gpu.dump_basename"
_bypassed = threading.local()
_log = logging.getLogger("rjax")


class ProgramStore:
    """Compiled programs on disk, found by what they depend on.

    JAX's persistent cache finds a program by its lowered module, so that each start must trace and
    lower every program, which takes several times as long as loading them. A store needs neither.

    Files that cannot be read are deleted, files that cannot be written are not kept; both cost time
    and nothing else. The files that were used last are kept, 8 GiB in all. A program is code: a
    folder or a file that belongs to another user, or that every user can write, is refused.

    Any thread may call the methods, and processes may share the folder.

    Args:
        folder: directory of the files; made if it is not there.
        identity: the programs' `program_identity`.
        mesh: devices that run the programs.

    Attributes:
        folder: directory of the files.
    """

    def __init__(self, folder: pathlib.Path, identity: Mapping[str, str], mesh: Mesh) -> None:
        self.folder = folder
        self._identity = identity
        self._devices = list(mesh.devices.flat)
        self._writable = True

    def load(self, key: Hashable) -> jax.stages.Compiled | None:
        """The program of a key, if it is there.

        Args:
            key: its repr tells it from all others of this identity.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                for status in (os.stat(self.folder), os.fstat(file.fileno())):
                    if reason := distrust(status):
                        self._refuse(reason)
                        return None
                data = file.read()
            body = data[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
                raise ValueError("the file is damaged")
            serialized, in_tree, out_tree = pickle.loads(body)  # noqa: S301  (a program is code)
            program = deserialize_and_load(
                serialized, in_tree, out_tree, self._devices[0].client, self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # of XLA, of pickle, of the disk: compiling is always possible
            _log.info("a compiled program cannot be used and is compiled again: %s", error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # of a folder that this process may only read
            os.utime(path)  # used last
        return program

    def save(self, key: Hashable, program: jax.stages.Compiled) -> None:
        """Keep a program, unless XLA cannot serialise it or the folder cannot be written or
        trusted."""
        if not self._writable:
            return
        try:
            body = pickle.dumps(serialize(program))
        except Exception as error:  # of XLA; the program itself runs
            _log.info("a compiled program is not kept: %s", error)
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if reason := distrust(os.stat(self.folder)):
                self._refuse(reason)
                return
            self._make_space(len(body))
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                try:
                    file.write(hashlib.sha256(body).digest() + body)
                    file.close()
                    os.replace(file.name, self._path(key))
                except BaseException:
                    pathlib.Path(file.name).unlink(missing_ok=True)
                    raise
        except OSError as error:
            self._writable = False
            _log.warning("compiled programs are not kept: %s", error)

    def _refuse(self, reason: str) -> None:
        if self._writable:
            self._writable = False
            _log.warning(
                "compiled programs in %s are neither read nor kept: %s", self.folder, reason
            )

    def _path(self, key: Hashable) -> pathlib.Path:
        name = hashlib.sha256(f"{self._identity} {key!r}".encode()).hexdigest()
        return self.folder / f"{name}.program"

    def _make_space(self, size: int) -> None:
        """Delete the files used longest ago until ``size`` bytes fit."""
        files = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                found = entry.stat()
                files.append((found.st_mtime, found.st_size, entry.path))
        excess = sum(size for _, size, _ in files) + size - _MAX_BYTES
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            excess -= size


def open_store(identity: Mapping[str, str] | None, mesh: Mesh) -> ProgramStore | None:
    """A store in JAX's compilation cache; None without such a folder, or without an identity.

    Args:
        identity: the programs' `program_identity`.
        mesh: devices that run the programs.
    """
    folder = jax.config.jax_compilation_cache_dir
    if (
        identity is None
        or not folder
        or "://" in folder
        or not jax.config.jax_enable_compilation_cache
    ):
        return None
    return ProgramStore(pathlib.Path(folder) / "programs", identity, mesh)


def compiler_options(leaves: Iterable[Any], device: Any) -> dict[str, bool]:
    """Options of XLA for the steps of a model, as ``jax.stages.Lowered.compile`` takes them.

    On a GPU, XLA compiles dozens of Triton kernels for each product and times them against cuBLAS.
    With fp8 weights this is most of the time to compile a step. With fp8 and bfloat16 weights,
    Hopper's steps without these kernels are at least as fast. Weights of integers and other GPUs,
    where more products are XLA's, keep its default: the option was not measured there.

    Args:
        leaves: parameter leaves of the model, or their shapes.
        device: the JAX device that runs the steps.
    """
    capability = compute_capability(device)
    hopper = capability is not None and int(capability) in HOPPER
    if hopper and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        return {"xla_gpu_enable_triton_gemm": False}
    return {}


class CompiledPrograms:
    """Programs of steps, lowered and compiled once in a process, and kept in a store.

    It holds no array, so that a thread that compiles keeps no memory of a closed engine. Any thread
    may call the methods.

    Args:
        programs: the jitted functions.
        arguments: shapes and shardings of their arguments.
        store: where they are kept between runs; None keeps none.

    Attributes:
        arguments: shapes and shardings of the programs' arguments.
    """

    def __init__(
        self, programs: StepPrograms, arguments: ProgramArguments, store: ProgramStore | None
    ) -> None:
        self.arguments = arguments
        self._programs = programs
        self._store = store
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, key: ProgramKey) -> jax.stages.Compiled:
        """The program; compiled now if it is neither in memory nor on disk."""
        if key not in self._compiled and not self.load(key):
            self.compile(key, self.lower(key))
        return self._compiled[key]

    def load(self, key: ProgramKey) -> bool:
        """Load the program from disk; return whether it is there."""
        program = self._store.load(key) if self._store is not None else None
        if program is not None:
            self._compiled[key] = program
        return program is not None

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace and lower the program."""
        arguments = self.arguments.of(key, self._programs.layouts)
        return self._programs.get(key).lower(*arguments)

    def compile(self, key: ProgramKey, lowered: jax.stages.Lowered) -> None:
        """Compile the program, and keep it."""
        self._compiled[key] = self.compile_for_disk(key, lowered)

    def compile_for_disk(self, key: ProgramKey, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the program, and keep it on disk but not in this process."""
        options = compiler_options(self.arguments.leaves, self.arguments.mesh.devices.flat[0])
        if self._store is None:
            return lowered.compile(compiler_options=options)
        # XLA cannot write a program that JAX's cache has read; nor should both keep it.
        with without_cache():
            program = lowered.compile(compiler_options=options)
        self._store.save(key, program)
        return program


def keep_compiled(folder: str | None) -> None:
    """Set JAX's persistent compilation cache to this folder; ``~`` is the user's home.

    JAX has one such folder for the process. A folder that is set already is kept, and None changes
    nothing. A folder that cannot be made, or that others can put programs into, is not used, with a
    warning.
    """
    _name_kernels_by_content()
    _hook_cache()
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    path = pathlib.Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = distrust(path.stat())
    except OSError as error:
        reason = str(error)
    if reason is not None:
        warnings.warn(
            f"compiled steps are not kept between runs in {path}: {reason}; or choose another "
            "compilation_cache_dir",
            stacklevel=2,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    compilation_cache.reset_cache()  # JAX may have initialised it as disabled


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """In this thread, JAX neither looks for compiled programs in its cache nor puts them there."""
    _hook_cache()
    _bypassed.depth = getattr(_bypassed, "depth", 0) + 1
    try:
        yield
    finally:
        _bypassed.depth -= 1


@functools.cache  # once a process
def _hook_cache() -> None:
    """Serve `without_cache`, and make JAX delete an entry that it cannot read.

    JAX warns of such an entry, which a full disk may have truncated, and compiles the program, but
    never overwrites an existing entry. Every later start would warn and compile again.
    """
    read, write = cache_reader.get_executable_and_time, cache_reader.put_executable_and_time

    def checked(cache_key: str, *arguments: Any, **options: Any) -> Any:
        if getattr(_bypassed, "depth", 0):
            return None, None
        try:
            return read(cache_key, *arguments, **options)
        except Exception:
            entry = f"{jax.config.jax_compilation_cache_dir}/{cache_key}-cache"
            with contextlib.suppress(OSError):
                pathlib.Path(entry).unlink()
            raise

    def put(*arguments: Any, **options: Any) -> None:
        if not getattr(_bypassed, "depth", 0):
            write(*arguments, **options)

    cache_reader.get_executable_and_time = checked
    cache_reader.put_executable_and_time = put


@functools.cache  # once a process
def _name_kernels_by_content() -> None:
    """Make Mosaic name a kernel by its content, not by a counter of lowered kernels.

    The name is part of the compiled program. With a counter in it, a kernel in two programs is
    compiled twice, and a process that lowers in another order finds no program on disk.
    """
    dialect: Any = mosaic_gpu.dialect  # pyright: ignore[reportPrivateImportUsage]
    numbered = dialect.get_or_set_dump_options

    def named(module: Any) -> Any:
        attributes = module.operation.attributes
        if _NAME not in attributes:
            name = hashlib.sha256(str(module).encode()).hexdigest()[:16]
            with module.context:
                attributes[_NAME] = ir.StringAttr.get(name)
        return numbered(module)

    dialect.get_or_set_dump_options = named
