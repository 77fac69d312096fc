"""The one place that chooses a kernel."""

import dataclasses

from rjax.pallas_kernels.experts.kernels import KERNELS as EXPERTS_KERNELS
from rjax.pallas_kernels.gated_delta.kernels import KERNELS as DELTA_KERNELS
from rjax.pallas_kernels.gemm.kernels import KERNELS as GEMM_KERNELS
from rjax.pallas_kernels.kernel import DeviceInfo, Kernel, Problem, registered_kernels
from rjax.pallas_kernels.layer.kernels import KERNELS as LAYER_KERNELS
from rjax.pallas_kernels.residual.kernels import KERNELS as RESIDUAL_KERNELS
from rjax.pallas_kernels.rope_and_cache.kernels import KERNELS as ROPE_KERNELS


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for a problem.

    Attributes:
        problem: the problem.
        kernel: the first kernel that takes it. None where no kernel does the whole operation: its
            steps are then operations of their own.
        refused: (name, reason) of the kernels before it.
    """

    problem: Problem
    kernel: Kernel | None
    refused: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatcher:
    """Chooses the kernel of each problem.

    Attributes:
        backend: "mosaic", "triton" or "xla" where only kernels of that backend and plain JAX are
            considered, else "auto".
        kernels: the kernels in the order in which they are asked.
    """

    backend: str
    kernels: tuple[Kernel, ...]

    @classmethod
    def of(cls, backend: str, device: DeviceInfo) -> "Dispatcher":
        """Make a dispatcher with all kernels that run on a device, or those of one backend.

        Those from `register_kernel` come first, plain JAX comes last.
        """
        of_layers = (*LAYER_KERNELS, *GEMM_KERNELS, *EXPERTS_KERNELS, *DELTA_KERNELS)
        kernels = (*registered_kernels(), *of_layers, *RESIDUAL_KERNELS, *ROPE_KERNELS)
        return cls(
            backend,
            tuple(
                kernel
                for kernel in kernels
                if kernel.backend == "xla"
                or (backend in ("auto", kernel.backend) and kernel.runs_on(device))
            ),
        )

    @property
    def exchanges_shares(self) -> bool:
        """Whether a kernel reads the shares of other devices from their memory."""
        return any(kernel.operation == "all_reduce_rms_norm" for kernel in self.kernels)

    def without(self, name: str) -> "Dispatcher":
        """A dispatcher that does not consider the kernel of this name.

        Raises:
            ValueError: no kernel has this name.
        """
        rest = tuple(kernel for kernel in self.kernels if kernel.name != name)
        if rest == self.kernels:
            names = ", ".join(kernel.name for kernel in self.kernels)
            raise ValueError(f"no kernel is named {name!r}; there are {names}")
        return dataclasses.replace(self, kernels=rest)

    def choose(self, problem: Problem) -> Choice:
        """The first kernel that does not refuse."""
        refused = []
        for kernel in self.kernels:
            if kernel.operation != problem.operation:
                continue
            reason = problem.obstacle or kernel.refusal(problem)
            if reason is None:
                return Choice(problem, kernel, tuple(refused))
            refused.append((kernel.name, reason))
        return Choice(problem, None, tuple(refused))
