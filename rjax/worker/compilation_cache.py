"""Compiled steps kept on disk, so that a second start need not compile again."""

import contextlib
import functools
import hashlib
import pathlib
import warnings
from typing import Any

import jax
from jax._src import compilation_cache as cache_reader
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.extend.mlir import ir

_WORTH_KEEPING = 0.2  # seconds of compiling
_NAME = "mosaic_gpu.dump_basename"


def keep_compiled(folder: str | None) -> None:
    """Let JAX keep what it compiles in this folder; ``~`` is the user's home.

    JAX has one such folder for the whole process: one that is set already stays, and None leaves
    things as they are.
    """
    _name_kernels_by_content()
    _drop_unreadable_entries()
    if folder is None or jax.config.jax_compilation_cache_dir is not None:
        return
    path = pathlib.Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled steps are not kept between runs: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _WORTH_KEEPING)
    compilation_cache.reset_cache()  # it may have been found switched off already


@functools.cache  # once a process
def _drop_unreadable_entries() -> None:
    """Have JAX delete an entry that it cannot read, such as one cut short by a full disk.

    JAX warns of it and compiles anew, but it never writes over an entry that exists: every later
    start would warn and compile again.
    """
    read = cache_reader.get_executable_and_time

    def checked(cache_key: str, *arguments: Any, **options: Any) -> Any:
        try:
            return read(cache_key, *arguments, **options)
        except Exception:
            entry = f"{jax.config.jax_compilation_cache_dir}/{cache_key}-cache"
            with contextlib.suppress(OSError):
                pathlib.Path(entry).unlink()
            raise

    cache_reader.get_executable_and_time = checked


@functools.cache  # once a process
def _name_kernels_by_content() -> None:
    """Have Mosaic name a kernel for its content and not for how many were lowered before it.

    The name is part of what is compiled: with a number in it no kernel is found again that stands
    in two programs, and no program on disk by a process that lowers in another order.
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
