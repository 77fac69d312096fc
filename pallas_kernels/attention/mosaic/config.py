"""The static configuration of the Mosaic attention kernel."""

import dataclasses
import math

TILE = 64  # tokens of one K or V tile
CONSUMERS = 2  # warpgroups that compute
_SMEM_BYTES = 232_448 - 2048  # what a Hopper block may take, less room for barriers


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """What the compiled kernel depends on besides array shapes and the packed plan's lists.

    Attributes:
        scale, sliding_window, soft_cap: of AttentionSpec.
        programs: persistent programs in the grid.
        ring: slots of two tiles in shared memory.
        ping_pong: consumer warpgroups of a wide unit take turns on the tensor cores.
        early_launch: start while the kernel before still runs, and wait for it on the device.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    programs: int
    ring: int
    ping_pong: bool
    early_launch: bool

    @property
    def unit(self) -> float:
        """One unit of the kernel's scores: of q @ k, or of ``tanh`` where there is a soft cap."""
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def log2_factor(self) -> float:
        """What takes the kernel's scores to powers of two."""
        return self.unit * math.log2(math.e)


def ring_slots(head_dim: int, itemsize: int) -> int:
    """Slots (two tiles each) that fit in shared memory beside the queries."""
    slot = CONSUMERS * TILE * head_dim * itemsize
    return (_SMEM_BYTES - slot) // slot
