"""How the Triton attention kernel is cut, by device and head dim."""

import dataclasses

import jax

HEAD_DIMS = range(16, 257, 16)
WIDE_ROWS = 64  # matrix rows (query rows times heads of a group) of a wide block
_NO_GPU = (8.0, 128)  # compute capability and multiprocessors to lower for without a GPU
_CTAS_PER_SM = 8  # several times the resident ones, so that their work balances


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """What the compiled kernel depends on besides shapes and options.

    Attributes:
        tokens: of one tile of K and V.
        warps, stages: of Triton's compiler.
        num_ctas: persistent CTAs to launch.
    """

    tokens: int
    warps: int
    stages: int
    num_ctas: int


def tiling(head_dim: int) -> Tiling:
    """For the default device; within the shared memory of every Ada chip, 99 KiB a block."""
    large = head_dim > 128
    return Tiling(
        tokens=32 if large else 64,
        warps=8 if large else 4,  # fewer have no registers for the accumulator
        stages=2 if large else 3,
        num_ctas=_CTAS_PER_SM * _device()[1],
    )


def narrow_rows() -> int:
    """Matrix rows of a block of one query row: the least of mma.sync; on Hopper those of a wide
    block, which the larger instructions take for the same time and with the same bits."""
    return WIDE_ROWS if _device()[0] >= 9 else 16


def _device() -> tuple[float, int]:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return _NO_GPU
    return float(device.compute_capability), device.core_count
