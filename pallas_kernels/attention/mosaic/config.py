"""The static configuration of the Mosaic attention kernel."""

import dataclasses
import math

TILE = 64  # tokens of one K or V tile
PARTS = (16, 32, 48, TILE)  # tokens of a last tile that come, as many as are used
ROWS = 64  # rows of one warpgroup's matrix product
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
FP8_HEAD_DIMS = (64, 96, 128, 192, 256)  # whole runs of 32 bytes, as the tensor cores read
CONSUMERS = 2  # warpgroups that compute
FEW_READERS = 128  # rows of a step up to which few wide items read the same KV
_SMEM_BYTES = 232_448 - 2048  # what a Hopper block may take, less room for barriers


@dataclasses.dataclass(frozen=True, slots=True)
class KernelConfig:
    """What the compiled kernel depends on besides array shapes and the packed plan's lists.

    Attributes:
        scale, sliding_window, soft_cap: of AttentionSpec.
        query_rows: matrix rows there is room for in a place for queries, for each warpgroup.
        query_buffers: places for the queries of a unit.
        programs: persistent programs in the grid.
        ring: slots of two tiles in shared memory.
        ping_pong: consumer warpgroups of a wide unit take turns on the tensor cores.
        early_launch: start while the kernel before still runs, and wait for it on the device.
    """

    scale: float
    sliding_window: int | None
    soft_cap: float | None
    query_rows: int
    query_buffers: int
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


def query_buffers(head_dim: int) -> int:
    """Places for the queries of a unit in shared memory: two, so that those of the next unit come
    while one is computed, and one where head dims are large and the ring needs the memory."""
    return 2 if head_dim <= 128 else 1


def query_box(rows: int, group: int, head_dim: int) -> int:
    """Rows that one copy of queries takes, at least ``rows``: copies are of whole 128 bytes."""
    unit = 128 // math.gcd(128, group * head_dim * 2)
    return -(-rows // unit) * unit


def row_columns(group: int, head_dim: int) -> int:
    """Columns for the ``group`` heads of one row that share a KV head (``row_unit``); 0 where they
    are rows: the tensor cores take head dims as rows in whole 64."""
    return -(-group // 8) * 8 if group <= 16 and head_dim % ROWS == 0 else 0


def ring_slots(head_dim: int, query_rows: int, buffers: int, itemsize: int) -> int:
    """Slots (two tiles each, ``itemsize`` bytes a number) that fit in shared memory beside 16-bit
    queries and, where pages are of 8 bits, a tile of 16 bits for each warpgroup."""
    row = CONSUMERS * head_dim
    beside = 2 * query_rows * buffers + (2 * TILE if itemsize == 1 else 0)
    return (_SMEM_BYTES - row * beside) // (row * TILE * itemsize)
