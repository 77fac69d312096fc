"""Compiles many programs in parallel."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
from tqdm.auto import tqdm

_MAX_THREADS = 4  # lowering holds the GIL and feeds no more compilers than this


def compile_ahead(
    programs: Iterable[jax.stages.Lowered], count: int, *, title: str, progress: bool
) -> None:
    """Compile programs, several at a time; their jitted functions keep the results.

    ``programs`` is iterated while others compile. XLA serialises its autotuning on a device, so the
    kernels that it chooses are those of a sequential compilation.

    Args:
        programs: lowered calls of jitted functions.
        count: of the programs.
        title: of the progress bar.
        progress: show a progress bar.
    """
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    failed: list[jax.stages.Lowered] = []
    with tqdm(total=count, desc=title, disable=not progress) as bar:

        def compile_one(program: jax.stages.Lowered) -> None:
            try:
                program.compile()
            except jax.errors.JaxRuntimeError:
                failed.append(program)
            else:
                bar.update()

        pool = ThreadPoolExecutor(threads, "rjax-compile")
        try:
            for done in [pool.submit(compile_one, program) for program in programs]:
                done.result()
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:  # Ctrl-C: compilers cannot be stopped, so do not wait for them
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        # Autotuning allocates device memory; programs that ran out of it in parallel compile alone.
        for program in failed:
            program.compile()
            bar.update()
