"""The persistent compilation cache: a second start compiles no step again."""

import contextlib
import functools
import hashlib
import pathlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compilation_cache as cache_reader
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.extend.mlir import ir

from rjax.worker.trusted_files import distrust

_MIN_COMPILE_SECONDS = 0.2  # of a program that is kept
_NAME = "mosaic_gpu.dump_basename"
_bypassed = threading.local()


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
