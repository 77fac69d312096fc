"""How far the compilation of the step sizes is."""

import dataclasses

COMPILE_THREAD = "rjax-compile"
"""Name of the threads that compile in the background."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompileProgress:
    """Programs of an engine, and the time that requests waited for them.

    Attributes:
        compiled: programs that are compiled.
        total: programs to compile. Grows when a request needs one that was not planned.
        waited_seconds: time that steps waited for programs to compile.
        waiting: whether a step waits for one now.
    """

    compiled: int
    total: int
    waited_seconds: float
    waiting: bool = False
