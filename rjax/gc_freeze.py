"""Keep Python's garbage collector from scanning long-lived objects during a run."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def freeze_gc_heap() -> Iterator[None]:
    """Exclude all existing objects from garbage collection inside the block (``gc.freeze``).

    A full collection scans every object of the process, including those of JAX and the caller. It
    takes tenths of a second, during which no step is dispatched. At the end of the block all
    objects are unfrozen, including those that the caller froze before.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
