"""One implementation of an operation, and the registry of all."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rjax.worker.kernels.problem import Operation, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operation.

    Attributes:
        name: name in logs and reports, such as "mosaic.split_k".
        operation: what it computes; ``Problem`` says with which operands.
        backends: names of the backends whose engines use it.
        refusal: returns why it cannot take a problem, or None.
        run: computes it: (problem, *operands) to the result.
        pads_rows: whether steps of few rows are worth padding to a number of rows that it takes.
        dequantises: whether it widens quantised weights before it multiplies them.
    """

    name: str
    operation: Operation
    backends: frozenset[str]
    refusal: Callable[[Problem], str | None]
    run: Callable[..., Any]
    pads_rows: bool = False
    dequantises: bool = False


_REGISTERED: list[Kernel] = []


def register_kernel(kernel: Kernel) -> None:
    """Have every engine made from now on consider a kernel, before those that are there already.

    Call this once, when the module that holds the kernel is imported.

    Raises:
        ValueError: a kernel of this name is registered already.
    """
    if any(other.name == kernel.name for other in _REGISTERED):
        raise ValueError(f"a kernel named {kernel.name!r} is registered already")
    _REGISTERED.append(kernel)


def registered_kernels() -> tuple[Kernel, ...]:
    """The kernels from outside, the one registered last first."""
    return tuple(reversed(_REGISTERED))
