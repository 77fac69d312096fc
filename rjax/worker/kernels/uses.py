"""From choices of kernels to what users see."""

from collections.abc import Iterable

from rjax.batch.kernel_use import KernelUse
from rjax.worker.backend import Backend
from rjax.worker.kernels.dispatcher import Choice


def kernel_uses(rows: int, choices: Iterable[Choice], backend: Backend) -> list[KernelUse]:
    """The distinct uses of kernels in a step of so many rows, attention first.

    An operation that no kernel computes whole is left out: its parts are there.
    """
    attention = f"{backend.name}.paged_attention"
    uses = [KernelUse(rows, "attention", "", attention, backend.refused)]
    for choice in choices:
        if choice.kernel is not None:
            problem = choice.problem
            use = (problem.operation, problem.label, choice.kernel.name, choice.refused)
            uses.append(KernelUse(rows, *use))
    return list(dict.fromkeys(uses))
