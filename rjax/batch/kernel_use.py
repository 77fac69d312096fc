"""Which kernel computes an operation."""

import dataclasses

SEPARATE = "separate kernels"
"""Stands for the kernel of an operation that no kernel does as a whole."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelUse:
    """The kernel of one operation at one step size.

    Attributes:
        rows: tokens of the step.
        operation: name of the operation, such as "linear" or "attention".
        label: the axes of a projection, such as "D -> K A H"; "" for other operations.
        kernel: name of the kernel, such as "mosaic.split_k"; None where no kernel does the whole
            operation, such as a decoder layer, whose parts have kernels of their own.
        refused: (name, reason) of the faster kernels that do not take it.
    """

    rows: int
    operation: str
    label: str
    kernel: str | None
    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        what = f"{self.operation} {self.label}".rstrip()
        reasons = "; ".join(f"{name} does not: {reason}" for name, reason in self.refused)
        return f"{what} by {self.kernel or SEPARATE}" + (f" ({reasons})" if reasons else "")
