"""How long each phase of a start took."""

import contextlib
import time
from collections.abc import Iterator


class StartupTimes:
    """Seconds of each phase, without the phases nested in it.

    Attributes:
        seconds: seconds by name of the phase, in the order of the phases' ends. A phase that ran
            twice has the sum.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._nested = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block under ``name``."""
        before, start = self._nested, time.monotonic()
        self._nested = 0.0
        try:
            yield
        finally:
            whole = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._nested
            self._nested = before + whole
