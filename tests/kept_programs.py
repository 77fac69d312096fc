"""Programs of engines that a test run keeps on disk, for engines without code of a test in them."""

import contextlib
from collections.abc import Iterator

import pytest

from rjax.worker import worker
from rjax.worker.programs import cache


@contextlib.contextmanager
def kept_programs() -> Iterator[None]:
    """Engines made in the block trace, lower and compile no program that an earlier one did.

    The key of a program covers the source of rjax, not the code that a test puts into a step, such
    as a patched kernel. The programs are kept in the test run's cache, which its processes share.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "open_store", cache.open_store)
        yield
