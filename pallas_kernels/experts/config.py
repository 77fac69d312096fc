"""Tile sizes of a grouped GEMM."""

import dataclasses
import math

from rjax.pallas_kernels.experts.work_list import TILE_ROWS, tile_rows
from rjax.pallas_kernels.mosaic.emit import num_sms

WGMMA_M = 64  # columns of a consumer, of each matrix
BLOCK_K = 64  # of 16-bit weights
_MANY_ROWS = 64  # of a tile, from which products and not weights bound the time
_SUMS_OF_THREE = 128  # rows of all matrices that three consumers have registers for
_SMEM_BYTES = 220 << 10  # of an SM
_MAX_STAGES = 8
_MOST_BLOCK_K = 192


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Tile sizes of a CTA.

    Attributes:
        consumers: consumer warpgroups, each with 64 columns of every matrix.
        block_k: depth of a pipeline stage.
        num_stages: pipeline stages.
        num_ctas: C, all resident at once.
        reuse: whether weights are read more than once; they then stay in the L2 cache.
    """

    consumers: int
    block_k: int
    num_stages: int
    num_ctas: int
    reuse: bool

    @property
    def tile_columns(self) -> int:
        """Columns of the CTA, of each matrix."""
        return self.consumers * WGMMA_M


def choose_config(
    *,
    tile_rows: int,
    tiles: int,
    num_experts: int,
    matrices: int,
    columns: int,
    depth: int,
    bits: int = 16,
    scale_bytes: float = 0,
) -> GroupedConfig:
    """The config of a grouped GEMM.

    Few rows: one consumer and two CTAs per SM, so that more loads are in flight. Many rows: two
    consumers or three share the rows in shared memory.

    Args:
        tile_rows: R.
        tiles: most tiles of the work list.
        num_experts: J.
        matrices, columns, depth: W, E and D.
        bits: bits of a weight.
        scale_bytes: bytes of scales that come with each weight.
    """
    many = tile_rows >= _MANY_ROWS
    consumers = _consumers(matrices * tile_rows, columns) if many else 1
    ctas_per_sm = 1 if many else 2
    block_k = choose_block_k(depth, bits)
    weights = matrices * consumers * WGMMA_M * (bits / 8 + scale_bytes)
    stage = int(block_k * (weights + 2 * tile_rows))
    items = tiles * (columns // (consumers * WGMMA_M))
    return GroupedConfig(
        consumers=consumers,
        block_k=block_k,
        num_stages=min(_MAX_STAGES, _SMEM_BYTES // ctas_per_sm // stage),
        num_ctas=min(items, ctas_per_sm * num_sms()),
        reuse=tiles > 2 * num_experts,
    )


def choose_block_k(depth: int, bits: int) -> int:
    """Depth of a stage, a divisor: 128 bytes of a weight's row, or about as many in several swizzle
    atoms."""
    widest, atom = 128 * 8 // bits, swizzle_atom(depth, bits)
    if atom == widest:
        return widest
    most = max(widest, _MOST_BLOCK_K)
    return next(size for size in range(most // atom * atom, 0, -atom) if depth % size == 0)


def swizzle_atom(depth: int, bits: int) -> int:
    """Weights of a row that are swizzled together: as many as 128 bytes hold, or a divisor of the
    depth."""
    return math.gcd(depth, 128 * 8 // bits)


def choose_tile_rows(pairs: int, num_experts: int, width: int, *, promoted: bool = False) -> int:
    """Rows of a tile: `tile_rows`, but fewer where two consumers cannot share an expert's width, or
    where products are kept beside the sums.

    Three consumers have registers for ``_SUMS_OF_THREE`` rows of gate and up together.
    """
    two = width % (2 * WGMMA_M) == 0
    most = TILE_ROWS[-1] if two and not promoted else _SUMS_OF_THREE // 2
    if promoted and not two:
        most //= 2
    return min(tile_rows(pairs, num_experts), most)


def _consumers(sums: int, columns: int) -> int:
    if columns % (2 * WGMMA_M) == 0:
        return 2
    return 3 if columns % (3 * WGMMA_M) == 0 and sums <= _SUMS_OF_THREE else 1
