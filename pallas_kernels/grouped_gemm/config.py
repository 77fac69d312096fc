"""Tile sizes of a grouped GEMM."""

from rjax.pallas_kernels.grouped_gemm.stream import WGMMA_M, GroupedConfig
from rjax.pallas_kernels.grouped_gemm.work_list import TILE_ROWS, tile_rows
from rjax.pallas_kernels.mosaic_emit import num_sms

BLOCK_K = 64
_MANY_ROWS = 64  # of a tile, from which products and not weights bound the time
_SUMS_OF_THREE = 128  # rows of all matrices that three consumers have registers for
_SMEM_BYTES = 220 << 10  # of an SM
_MAX_STAGES = 8


def choose_config(
    *, tile_rows: int, tiles: int, num_experts: int, matrices: int, columns: int
) -> GroupedConfig:
    """The config of a grouped GEMM.

    Few rows: one consumer and two CTAs per SM, so that more loads are in flight. Many rows: two
    consumers or three share the rows in shared memory.

    Args:
        tile_rows: R.
        tiles: at most.
        num_experts: J.
        matrices, columns: W and E.
    """
    many = tile_rows >= _MANY_ROWS
    consumers = _consumers(matrices * tile_rows, columns) if many else 1
    ctas_per_sm = 1 if many else 2
    stage = BLOCK_K * 2 * (matrices * consumers * WGMMA_M + tile_rows)
    items = tiles * (columns // (consumers * WGMMA_M))
    return GroupedConfig(
        consumers=consumers,
        block_k=BLOCK_K,
        num_stages=min(_MAX_STAGES, _SMEM_BYTES // ctas_per_sm // stage),
        num_ctas=min(items, ctas_per_sm * num_sms()),
        reuse=tiles > 2 * num_experts,
    )


def choose_tile_rows(pairs: int, num_experts: int, width: int) -> int:
    """Rows of a tile: `tile_rows`, but fewer where two consumers cannot share an expert's width.

    Three consumers have registers for ``_SUMS_OF_THREE`` rows of gate and up together.
    """
    most = TILE_ROWS[-1] if width % (2 * WGMMA_M) == 0 else _SUMS_OF_THREE // 2
    return min(tile_rows(pairs, num_experts), most)


def _consumers(sums: int, columns: int) -> int:
    if columns % (2 * WGMMA_M) == 0:
        return 2
    return 3 if columns % (3 * WGMMA_M) == 0 and sums <= _SUMS_OF_THREE else 1
