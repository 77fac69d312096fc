"""Steps that take long, so that a request is not at its end before a test has done its part."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def slow_steps(engine: Any, seconds: float) -> Iterator[None]:
    """Steps of an engine of this process take longer, as those of a large model do."""
    before, step = vars(engine).get("step"), engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        del engine.step
        if before is not None:
            engine.step = before
