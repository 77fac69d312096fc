"""Progress of the compilation of the step sizes."""

import dataclasses
import math

COMPILE_THREAD = "rjax-compile"
"""Name of the threads that compile in the background."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileProgress:
    """Programs of an engine, and the time that requests waited for them.

    Attributes:
        compiled: programs that are compiled.
        total: programs to compile. Grows when a request needs one that was not planned.
        waits: begin and end, by ``time.monotonic``, of each time that a step waited for programs to
            compile; in order.
        waiting: whether a step waits for one now.
    """

    compiled: int
    total: int
    waits: tuple[tuple[float, float], ...] = ()
    waiting: bool = False

    def waited_seconds(self, begin: float = -math.inf, end: float = math.inf) -> float:
        """Seconds between two moments in which steps waited for programs to compile."""
        return sum(max(0.0, min(end, after) - max(begin, before)) for before, after in self.waits)
