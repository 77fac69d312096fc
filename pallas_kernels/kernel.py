"""What every kernel says of itself, and the problems by which one is chosen.

An operation is a folder. Its ``base.py`` has the problem and the operation in plain JAX; each other
kernel's module has its `Kernel`, and ``kernels.py`` lists all in the order in which they are asked.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

HOPPER = (9,)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device that runs the kernels.

    Attributes:
        platform: "cpu" or "gpu".
        compute_capability: an NVIDIA GPU's compute capability, 9.0 for Hopper; None for other
            devices.
    """

    platform: str
    compute_capability: float | None


def supports(device: DeviceInfo, compute_capabilities: tuple[int, ...]) -> bool:
    """Whether the device is a GPU of one of these major compute capabilities."""
    capability = device.compute_capability
    return (
        device.platform == "gpu"
        and capability is not None
        and int(capability) in compute_capabilities
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One operation at one size, on one device of the mesh.

    Attributes:
        operation: what is computed, such as "add_rms_norm".
        rows: number of rows, T.
        dtype: name of the float type of the activations.
        label: the axes of a projection, such as "D -> K A H", for reports.
        obstacle: what keeps every kernel of the operation from it, such as another kind of layer;
            None if nothing does.
    """

    operation: str
    rows: int
    dtype: str
    label: str = ""
    obstacle: str | None = None

    @property
    def schemes(self) -> tuple[Any, ...]:
        """How each weight is stored that the rows are multiplied by; () without such weights."""
        return ()


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an operation.

    Attributes:
        name: name in logs and reports, such as "mosaic.split_k".
        operation: what it computes; the operation's problem says with which operands.
        backend: "mosaic" or "triton", or "xla" for one in plain JAX, which every engine considers.
        refusal: returns why it cannot take a problem, or None.
        run: computes it: (problem, *operands) to the result.
        pads_rows: whether steps of few rows are worth padding to a number of rows that it takes.
        gives_partial: whether its product is a Partial, also where a device has all of the depth.
        dequantises: whether it widens quantised weights before it multiplies them.
        compute_capabilities: major versions of the GPUs that run it; None for any device.
    """

    name: str
    operation: str
    backend: str
    refusal: Callable[[Any], str | None]
    run: Callable[..., Any]
    pads_rows: bool = False
    gives_partial: bool = False
    dequantises: bool = False
    compute_capabilities: tuple[int, ...] | None = None

    def runs_on(self, device: DeviceInfo) -> bool:
        """Whether the device can run it, for problems that it takes."""
        return self.compute_capabilities is None or supports(device, self.compute_capabilities)


def takes_all(problem: Problem) -> None:
    """The refusal of kernels in plain JAX."""
    del problem


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
