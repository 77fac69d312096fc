"""Processes that the tests of the pages start."""

import os
import subprocess
import sys

import jax

from tests.docs.pages import ROOT
from tests.quick_compilation import process_environment


def run_python(*arguments: str, optimise: bool) -> str:
    """What ``python`` with these arguments prints, run from the root of the repository.

    Args:
        arguments: after ``python``.
        optimise: for programs that compute for longer than they compile.

    Raises:
        AssertionError: the exit status is not 0; the message is what it wrote to stderr.
    """
    own = process_environment(optimised=optimise)
    if folder := jax.config.jax_compilation_cache_dir:  # of the test run
        own |= {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
