"""Tile sizes of a quantised GEMM, chosen by an estimate of its time."""

import dataclasses
from collections.abc import Iterator

from rjax.pallas_kernels.mosaic.emit import num_sms

WGMMA_M = 64  # outputs of a warpgroup
MAX_TILE_ROWS = 128
FEW_ROWS = 64
"""A GEMM of more rows cuts them into tiles; a warpgroup multiplies each for two matrices."""
_MAX_PROMOTED = 96  # rows times matrices: registers for sums and for products beside them
PRODUCER_REGISTERS = 40  # per thread
_REGISTERS = 65536  # of an SM
_REGISTERS_OF_TWO = 120  # by the estimate: ptxas keeps to 128 then, and two CTAs share an SM
_SMEM_BYTES = 220 << 10  # of an SM
_PIPELINE_BYTES = 128 << 10  # of an SM: more in flight are not faster
_MAX_SPLIT_K = 8
_MAX_CONSUMERS = 4
_ONE_COLUMN_BLOCK = 8  # rows: the fewest columns of wgmma
_BLOCKS_IN_TURNS = 4  # of a split, at least, where warpgroups take stages in turn
_MIN_STAGES = 3  # with fewer, shorter ones are faster

# Rates of the estimate, bytes per microsecond.
_MEMORY_RATE = 4.3e6
_L2_RATE = 6.0e6  # into shared memory, all SMs
_SM_RATE = 46e3  # into shared memory, one SM
_UPCAST_RATE = 20e3  # int4 weights that one SM converts
_INTERLEAVED_UPCAST_RATE = 30e3
_TENSOR_RATE = 3.0e6  # 16-bit products of one SM per microsecond; twice as many in fp8
_ENOUGH_SMS = 0.9  # that part of the SMs reads at the memory's rate
_ROW_US = 2.0  # to compute the row
_START_US = 1.0  # until the first weights arrive, where no other CTA of the SM is at work


@dataclasses.dataclass(frozen=True, slots=True)
class GemmShape:
    """What a config is chosen for.

    Attributes:
        rows: rows of a tile of the other operand, a multiple of 8.
        row_tiles: number of tiles that cover the operand.
        matrices: W.
        outputs, depth: X and E.
        bits, row_bits: bits of a weight and of an element of the rows.
        interleaved: whether int4 weights are stored interleaved.
        resident_row: whether a CTA computes its one row first and keeps it (``gemv_row``).
        shares_sm: whether what computes it leaves registers for a second CTA of an SM.
        row_read_bytes: bytes that a CTA reads to compute its row.
    """

    rows: int
    matrices: int
    outputs: int
    depth: int
    bits: int
    row_bits: int
    interleaved: bool = False
    row_tiles: int = 1
    resident_row: bool = False
    shares_sm: bool = True
    row_read_bytes: int = 0

    @property
    def sums_in_place(self) -> bool:
        """Whether tensor cores add up the products of the whole depth (``products``)."""
        return self.row_bits == 16 and self.rows * self.matrices > _MAX_PROMOTED


@dataclasses.dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile sizes of a CTA.

    Attributes:
        consumers: consumer warpgroups, each with 64 outputs of every matrix.
        block_k: depth of a pipeline stage.
        split_k: splits of the depth, each computed by its own CTAs.
        num_stages: pipeline stages.
        stage_groups: groups of ``consumers`` warpgroups that take stages in turn, so that one
            converts and multiplies while another waits; their sums are added at the end.
    """

    consumers: int
    block_k: int
    split_k: int
    num_stages: int
    stage_groups: int = 1


def consumer_registers(consumers: int) -> int:
    """Registers per thread that the producer leaves to each of several consumer warpgroups."""
    threads = 128 * (consumers + 1)
    pool = _REGISTERS // threads // 8 * 8 * threads
    return min(232, (pool - 128 * PRODUCER_REGISTERS) // (128 * consumers) // 8 * 8)


def configs(shape: GemmShape, *, may_split: bool) -> list[GemmConfig]:
    """The configs that fit, the shortest estimated time first; then the fewest splits.

    One consumer leaves room for two CTAs per SM, so that one streams weights while the other
    starts or ends.
    """
    return sorted(_fitting(shape, may_split), key=lambda c: (_estimate_us(shape, c), c.split_k))


def _fitting(shape: GemmShape, may_split: bool) -> Iterator[GemmConfig]:
    # A swizzle atom has at most 128 bytes of a row.
    widest = 128 * 8 // shape.bits
    block_k = widest if shape.depth % widest == 0 else widest // 2
    if _MIN_STAGES * _stage_bytes(shape, 1, block_k) > _SMEM_BYTES:
        block_k //= 2
    blocks = shape.depth // block_k
    for consumers in range(1, _MAX_CONSUMERS + 1):
        if shape.outputs % (consumers * WGMMA_M):
            continue
        if consumers > 1 and _registers(shape) > consumer_registers(consumers):
            continue
        tiles = shape.outputs // (consumers * WGMMA_M)
        most_per_sm = _most_ctas_per_sm(shape, consumers)
        stage = _stage_bytes(shape, consumers, block_k)
        for split_k in range(1, min(_MAX_SPLIT_K, blocks) + 1 if may_split else 2):
            ctas = tiles * split_k * shape.row_tiles
            if split_k > 1 and ctas > most_per_sm * num_sms():
                break
            ctas_per_sm = min(most_per_sm, -(-ctas // num_sms()))
            row = _row_bytes(shape, -(-blocks // split_k) * block_k)
            fitting = (_SMEM_BYTES // ctas_per_sm - row) // stage
            useful = max(4, _PIPELINE_BYTES // ctas_per_sm // stage)
            if fitting >= 2:
                of_split = -(-blocks // split_k)
                stages = max(2, min(fitting, useful, of_split))
                yield GemmConfig(consumers, block_k, split_k, stages)
                turns = of_split >= _BLOCKS_IN_TURNS and _takes_turns(shape, consumers)
                if turns and most_per_sm == 1:
                    yield GemmConfig(consumers, block_k, split_k, stages // 2 * 2, stage_groups=2)


def _takes_turns(shape: GemmShape, consumers: int) -> bool:
    """Whether twice as many warpgroups may be faster: they convert weights for few rows.

    With two matrices, each warpgroup converts enough between two waits.
    """
    few = shape.rows <= _ONE_COLUMN_BLOCK and shape.matrices == 1
    return few and shape.row_bits == 16 and 2 * consumers <= _MAX_CONSUMERS


def _most_ctas_per_sm(shape: GemmShape, consumers: int) -> int:
    if not shape.shares_sm:
        return 1
    return 2 if consumers == 1 and _registers(shape) <= _REGISTERS_OF_TWO else 1


def _registers(shape: GemmShape) -> int:
    """Registers per consumer thread, about; with fewer, ptxas serialises the wgmma."""
    sums = shape.rows // 2  # of one matrix
    if shape.sums_in_place:
        return shape.matrices * sums + 80
    if shape.row_bits == 8:
        at_once = shape.matrices if shape.rows <= FEW_ROWS else 1
        return (shape.matrices + at_once) * sums + 32
    return (shape.matrices + 1) * sums + 32 * shape.matrices + 40


def _stage_bytes(shape: GemmShape, consumers: int, block_k: int) -> int:
    weights = shape.matrices * consumers * WGMMA_M * shape.bits * block_k // 8
    return weights + (0 if shape.resident_row else shape.rows * shape.row_bits * block_k // 8)


def _row_bytes(shape: GemmShape, columns: int) -> int:
    """Bytes of the resident row in shared memory; 0 if there is none."""
    return shape.rows * shape.row_bits * columns // 8 if shape.resident_row else 0


def _estimate_us(shape: GemmShape, config: GemmConfig) -> float:
    tiles = shape.outputs // (config.consumers * WGMMA_M)
    ctas = tiles * config.split_k * shape.row_tiles
    depth = -(-shape.depth // config.block_k // config.split_k) * config.block_k
    loaded = _stage_bytes(shape, config.consumers, config.block_k) * depth // config.block_k
    loaded += shape.row_read_bytes
    weights = shape.matrices * shape.outputs * shape.depth * shape.bits // 8
    ctas_of_an_sm = -(-ctas // num_sms())
    products = shape.rows * shape.matrices * config.consumers * WGMMA_M * depth
    resident = min(ctas_of_an_sm, _most_ctas_per_sm(shape, config.consumers))
    # One warpgroup alone waits for its own results, and two still do so with few.
    warpgroups = resident * config.consumers * config.stage_groups
    busy = 0.6 if warpgroups == 1 else 0.75 if warpgroups == 2 and shape.matrices == 1 else 1.0
    idle = max(1.0, _ENOUGH_SMS * num_sms() / ctas)
    streamed = max(
        weights / _MEMORY_RATE * idle,
        ctas * loaded / _L2_RATE,
        ctas_of_an_sm * loaded / _SM_RATE,
        ctas_of_an_sm * products / (busy * _TENSOR_RATE * 16 / shape.row_bits),
    )
    if shape.bits == 4:
        upcast = shape.matrices * config.consumers * WGMMA_M * depth // 2
        rate = _INTERLEAVED_UPCAST_RATE if shape.interleaved else _UPCAST_RATE
        streamed = max(streamed, ctas_of_an_sm * upcast / (busy * rate))
    start = _START_US + (_ROW_US if shape.resident_row else 0)
    streamed += start * (-(-ctas_of_an_sm // resident) - 1)
    outputs = shape.matrices * shape.outputs * shape.rows * shape.row_tiles
    partials = 4 * config.split_k * outputs
    return streamed + 2 * partials / _MEMORY_RATE  # written, then read
