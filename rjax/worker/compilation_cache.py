"""Compiled steps kept on disk, so that a second start need not compile again."""

import pathlib
import warnings

import jax
from jax.experimental.compilation_cache import compilation_cache

_WORTH_KEEPING = 0.2  # seconds of compiling


def keep_compiled(folder: str | None) -> None:
    """Let JAX keep what it compiles in this folder; ``~`` is the user's home.

    JAX has one such folder for the whole process: one that is set already stays, and None leaves
    things as they are.
    """
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
