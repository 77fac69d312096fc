"""Python's garbage collector, kept from looking at what a run does not touch."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_gc_heap() -> Iterator[None]:
    """Collections in the block pass over what exists when it begins.

    A full collection goes through every object of the process, JAX's and the caller's: tenths of a
    second, in which no step is dispatched. Afterwards nothing is frozen, the caller's neither.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
