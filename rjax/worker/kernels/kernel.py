"""One implementation of an operation, and the registry of all."""

import dataclasses
from collections.abc import Callable
from typing import Any

from rjax.pallas_kernels.attention.backend import DeviceInfo, supports
from rjax.worker.kernels.problem import Operation, Problem

HOPPER = (9,)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operation.

    Attributes:
        name: name in logs and reports, such as "mosaic.split_k".
        operation: what it computes; ``Problem`` says with which operands.
        backend: "mosaic" or "triton", or "xla" for one in plain JAX, which every engine considers.
        refusal: returns why it cannot take a problem, or None.
        run: computes it: (problem, *operands) to the result.
        pads_rows: whether steps of few rows are worth padding to a number of rows that it takes.
        gives_partial: whether its product is a Partial, also where a device has all of the depth.
        dequantises: whether it widens quantised weights before it multiplies them.
        compute_capabilities: major versions of the GPUs that run it; None for any device.
    """

    name: str
    operation: Operation
    backend: str
    refusal: Callable[[Problem], str | None]
    run: Callable[..., Any]
    pads_rows: bool = False
    gives_partial: bool = False
    dequantises: bool = False
    compute_capabilities: tuple[int, ...] | None = None

    def runs_on(self, device: DeviceInfo) -> bool:
        """Whether the device can run it, for problems that it takes."""
        return self.compute_capabilities is None or supports(device, self.compute_capabilities)


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
