"""Which kernel computes what, for each step size."""

import dataclasses
from collections.abc import Iterable

from rjax.worker.kernels.dispatcher import Choice


@dataclasses.dataclass(frozen=True, slots=True)
class KernelUse:
    """The kernel of one operation at one step size.

    Attributes:
        rows: tokens of the step.
        operation: such as "linear" or "attention".
        label: the axes of a projection, such as "D -> K A H"; "" for other operations.
        kernel: its name, such as "mosaic.split_k".
        refused: (name, reason) of the faster kernels that do not take it.
    """

    rows: int
    operation: str
    label: str
    kernel: str
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        what = f"{self.operation} {self.label}".rstrip()
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.refused)
        return f"{self.rows} rows, {what}: {self.kernel}" + (f" ({reasons})" if reasons else "")


def kernel_uses(rows: int, choices: Iterable[Choice]) -> list[KernelUse]:
    """The distinct uses among the choices of one step, in order.

    An operation that no kernel does whole is left out: its steps are there.
    """
    uses = (
        KernelUse(
            rows, choice.problem.operation, choice.problem.label, choice.kernel.name, choice.refused
        )
        for choice in choices
        if choice.kernel is not None
    )
    return list(dict.fromkeys(uses))
