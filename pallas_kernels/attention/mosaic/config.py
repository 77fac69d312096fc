"""Tile sizes, limits and the static configuration of the Mosaic GPU attention kernel."""

import dataclasses
import math

KV_TILE = 64
"""Tokens of one K or V tile."""

LAST_TILE_TOKENS = (16, 32, 48, KV_TILE)
"""Sizes of the copy of an item's last tile. The smallest one that covers the used tokens is
loaded."""

WGMMA_M = 64
"""Rows of one warpgroup's matrix product."""

CONSUMERS = 2
"""Consumer warpgroups of a CTA. One more warpgroup is the producer."""

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
FP8_HEAD_DIMS = (64, 96, 128, 192, 256, 512)  # multiples of 32 bytes, as wgmma reads fp8 rows

_MAX_ACC_DIMS = 256  # of a [64, dims] accumulator: 128 registers a thread

EVICT_FIRST_MAX_ROWS = 128
"""Rows of a step up to which few cooperative work tiles read the same KV."""

_SMEM_BYTES = 232_448 - 2048  # the limit of a Hopper CTA, less room for barriers


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """Static inputs of the kernel besides array shapes and the work lists of the packed plan.

    Attributes:
        scale, sliding_window, soft_cap: the fields of AttentionSpec.
        q_rows: matrix rows of one query buffer; there is one for each warpgroup.
        q_stages: buffers for the queries of a work tile.
        num_ctas: persistent CTAs in the grid.
        kv_stages: pipeline stages in shared memory, see ``KVPipeline``.
        ping_pong: the consumer warpgroups of a cooperative work tile take turns on the tensor
            cores, so that the softmax of one overlaps the products of the other.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    q_rows: int
    q_stages: int
    num_ctas: int
    kv_stages: int
    ping_pong: bool

    @property
    def score_unit(self) -> float:
        """Factor from the kernel's scores to natural-log scores. The kernel's scores are q @ k, or
        ``tanh`` of the scaled products where there is a soft cap."""
        return self.scale if self.soft_cap is None else self.soft_cap

    @property
    def scale_log2(self) -> float:
        """Factor from the kernel's scores to exponents of two."""
        return self.score_unit * math.log2(math.e)


def split_head_parts(head_dim: int) -> int:
    """Consumer warpgroups that share the output dims of one head: 1, or 2 for split heads.

    A warpgroup accumulates at most 256 dims of 64 matrix rows in registers.
    """
    return 1 if head_dim <= _MAX_ACC_DIMS else CONSUMERS


def num_q_stages(head_dim: int) -> int:
    """Buffers for the queries of a work tile in shared memory.

    Two let the queries of the next work tile load during the current one. Large head dims have one,
    because the KV pipeline needs the memory.
    """
    return 2 if head_dim <= 128 else 1


def q_box_rows(rows: int, group: int, dims: int) -> int:
    """Rows of one TMA copy of queries, at least ``rows``: its bytes are a multiple of 128.

    dims: how many dims of a head one copy takes.
    """
    multiple = 128 // math.gcd(128, group * dims * 2)
    return -(-rows // multiple) * multiple


def swap_ab_columns(group: int, head_dim: int) -> int:
    """Columns of the accumulator in ``swap_ab``, for the ``group`` heads of one row.

    0 where swap-AB does not apply: more than 16 heads, or a head dim that is no multiple of the 64
    rows of wgmma.
    """
    return -(-group // 8) * 8 if group <= 16 and head_dim % WGMMA_M == 0 else 0


def num_kv_stages(head_dim: int, q_rows: int, q_stages: int, itemsize: int) -> int:
    """Pipeline stages that fit in shared memory.

    A stage is 64 tokens of two KV heads, or of half of the dims of a split head, ``itemsize`` bytes
    a number. Beside the stages lie the 16-bit queries and, for 8-bit pages, a 16-bit V tile of each
    warpgroup.
    """
    parts = split_head_parts(head_dim)
    row = CONSUMERS * head_dim // parts
    other = 2 * q_rows * q_stages + (2 * KV_TILE if itemsize == 1 else 0)
    return (_SMEM_BYTES - row * other) * parts // (row * KV_TILE * itemsize)
