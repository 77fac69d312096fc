"""Compiled programs on disk."""

import contextlib
import hashlib
import logging
import os
import pathlib
import pickle
import tempfile
from collections.abc import Hashable

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh

from rjax.worker.trusted_files import distrust

_MAX_BYTES = 8 * 2**30
_SUFFIX = ".program"
_DIGEST_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger("rjax")


def open_store(identity: str | None, mesh: Mesh) -> "ProgramStore | None":
    """A store in JAX's compilation cache; None without such a folder, or without an identity.

    Args:
        identity: digest of everything but its key that a program depends on.
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


class ProgramStore:
    """Compiled programs on disk, found by what they depend on.

    JAX's persistent cache finds a program by its lowered module, so that each start must trace and
    lower every program, which takes several times as long as loading them. This one needs neither.

    Files that cannot be read are deleted, files that cannot be written are not kept; both cost time
    and nothing else. The files that were used last are kept, 8 GiB in all. A program is code: a
    folder or a file that belongs to another user, or that every user can write, is refused.

    Any thread may call the methods, and processes may share the folder.

    Args:
        folder: directory of the files; made if it is not there.
        identity: digest of everything but its key that a program depends on.
        mesh: devices that run the programs.

    Attributes:
        folder: directory of the files.
    """

    def __init__(self, folder: pathlib.Path, identity: str, mesh: Mesh) -> None:
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
        return self.folder / (name + _SUFFIX)

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
