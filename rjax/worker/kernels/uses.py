"""Reports the choices of kernels to users."""

import logging
from collections.abc import Iterable

from rjax.batch.kernel_use import KernelUse
from rjax.worker.backend import Backend
from rjax.worker.kernels.dispatcher import Choice

_log = logging.getLogger("rjax")


class KernelLog:
    """Names the kernels of each step size in the log, when its first program is traced."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._logged: set[int] = set()

    def __call__(self, choices: list[Choice]) -> None:
        """Log the choices of a step unless its size is logged already."""
        rows = choices[0].problem.rows
        if rows not in self._logged:
            self._logged.add(rows)
            uses = kernel_uses(rows, choices, self._backend)
            _log.info("a step of %d rows: %s", rows, "; ".join(map(str, uses)))


def kernel_uses(rows: int, choices: Iterable[Choice], backend: Backend) -> list[KernelUse]:
    """The distinct uses of kernels in a step of ``rows`` rows, attention first.

    An operation that no kernel does as a whole is there for the kernels that refused it, beside the
    operations that it consists of.
    """
    attention = f"{backend.name}.paged_attention"
    uses = [KernelUse(rows, "attention", "", attention, backend.refused)]
    for choice in choices:
        if choice.kernel is None and not choice.refused:
            continue  # the backend has no kernel of this operation
        problem, name = choice.problem, None if choice.kernel is None else choice.kernel.name
        uses.append(KernelUse(rows, problem.operation, problem.label, name, choice.refused))
    return list(dict.fromkeys(uses))
