"""Many programs compiled side by side."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import jax
from tqdm.auto import tqdm

_MOST_THREADS = 4  # lowering holds the interpreter's lock, and keeps no more compilers busy


def compile_ahead(
    programs: Iterable[jax.stages.Lowered], count: int, *, title: str, progress: bool
) -> None:
    """Compile programs, several at a time; the jitted functions that they are of keep the results.

    A program is taken from ``programs`` while others compile. XLA lets no two of them time kernels
    on a device at once, so what it chooses is what it would choose one by one.

    Args:
        programs: lowered calls of jitted functions.
        count: how many there are.
        title: of the bar.
        progress: show a bar.
    """
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    short: list[jax.stages.Lowered] = []
    with tqdm(total=count, desc=title, disable=not progress) as bar:

        def compile_one(program: jax.stages.Lowered) -> None:
            try:
                program.compile()
            except jax.errors.JaxRuntimeError:
                short.append(program)
            else:
                bar.update()

        pool = ThreadPoolExecutor(threads, "rjax-compile")
        try:
            for done in [pool.submit(compile_one, program) for program in programs]:
                done.result()
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:  # Ctrl-C: a compiler cannot be stopped, and nobody waits for it
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        # To time kernels takes memory of the device: several at once may have had too little.
        for program in short:
            program.compile()
            bar.update()
