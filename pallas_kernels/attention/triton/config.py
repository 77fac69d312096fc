"""Tile sizes and launch parameters of the Triton attention kernel, by device and head dim."""

import dataclasses

import jax

HEAD_DIMS = range(16, 257, 16)
BLOCK_M = 64  # matrix rows (query rows times heads of a group) of a large block
_NO_GPU = (8.0, 128)  # compute capability and SMs to lower for without a GPU
_CTAS_PER_SM = 8  # several times the resident ones, so that their work balances


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """Launch parameters besides shapes and options.

    Attributes:
        tokens: tokens of one K or V tile.
        warps, stages: compiler options of Triton.
        num_ctas: persistent CTAs to launch.
    """

    tokens: int
    warps: int
    stages: int
    num_ctas: int


def tiling(head_dim: int) -> Tiling:
    """The launch parameters for the default device.

    They fit the shared memory of every Ada GPU, 99 KiB a CTA.
    """
    large = head_dim > 128
    return Tiling(
        tokens=32 if large else 64,
        warps=8 if large else 4,  # with fewer, the accumulator does not fit in registers
        stages=2 if large else 3,
        num_ctas=_CTAS_PER_SM * _device()[1],
    )


def small_block_m() -> int:
    """Matrix rows of a small block: the minimum of mma.sync. On Hopper it is that of a large block,
    because wgmma takes the same time for it and gives the same bits."""
    return BLOCK_M if _device()[0] >= 9 else 16


def _device() -> tuple[float, int]:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return _NO_GPU
    return float(device.compute_capability), device.core_count
