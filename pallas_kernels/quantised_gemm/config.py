"""Tile sizes of a quantised GEMM, chosen by an estimate of its time."""

import dataclasses
from collections.abc import Iterator

from rjax.pallas_kernels.mosaic_emit import num_sms

WGMMA_M = 64  # outputs of a warpgroup
_SMEM_BYTES = 220 << 10  # of an SM
_MAX_STAGES = 8  # more are not faster
_MAX_SPLIT_K = 8
_MAX_CONSUMERS = 4

# Rates of the estimate, bytes per microsecond.
_MEMORY_RATE = 4.3e6
_L2_RATE = 6.0e6  # into shared memory, all SMs
_SM_RATE = 60e3  # into shared memory, one SM
_UPCAST_RATE = 30e3  # int4 weights that one SM converts


@dataclasses.dataclass(frozen=True, slots=True)
class GemmShape:
    """What a config is chosen for.

    Attributes:
        rows: of the other operand, rounded up to 8.
        matrices: W.
        outputs, depth: X and E.
        bits, row_bits: of a weight and of an element of the rows.
    """

    rows: int
    matrices: int
    outputs: int
    depth: int
    bits: int
    row_bits: int


@dataclasses.dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile sizes of a CTA.

    Attributes:
        consumers: consumer warpgroups, each with 64 outputs of every matrix.
        block_k: depth of a pipeline stage.
        split_k: splits of the depth, each computed by its own CTAs.
        num_stages: pipeline stages.
    """

    consumers: int
    block_k: int
    split_k: int
    num_stages: int


def configs(shape: GemmShape, *, may_split: bool) -> list[GemmConfig]:
    """Those that fit, the shortest estimated time first; of equal ones, the fewest splits.

    One consumer leaves room for two CTAs per SM, so that one streams weights while the other
    starts or ends.
    """
    return sorted(_fitting(shape, may_split), key=lambda c: (_estimate_us(shape, c), c.split_k))


def _fitting(shape: GemmShape, may_split: bool) -> Iterator[GemmConfig]:
    # A swizzle atom has at most 128 bytes of a row.
    widest = 128 * 8 // shape.bits
    block_k = widest if shape.depth % widest == 0 else widest // 2
    blocks = shape.depth // block_k
    for consumers in range(1, _MAX_CONSUMERS + 1):
        if shape.outputs % (consumers * WGMMA_M):
            continue
        tiles = shape.outputs // (consumers * WGMMA_M)
        ctas_per_sm = 2 if consumers == 1 else 1
        stage = _stage_bytes(shape, consumers, block_k)
        fitting = _SMEM_BYTES // ctas_per_sm // stage
        for split_k in range(1, min(_MAX_SPLIT_K, blocks) + 1 if may_split else 2):
            if split_k > 1 and tiles * split_k > ctas_per_sm * num_sms():
                break
            stages = min(_MAX_STAGES, fitting, -(-blocks // split_k))
            if fitting >= 2:
                yield GemmConfig(consumers, block_k, split_k, max(2, stages))


def _stage_bytes(shape: GemmShape, consumers: int, block_k: int) -> int:
    weights = shape.matrices * consumers * WGMMA_M * shape.bits
    return (weights + shape.rows * shape.row_bits) * block_k // 8


def _estimate_us(shape: GemmShape, config: GemmConfig) -> float:
    tiles = shape.outputs // (config.consumers * WGMMA_M)
    ctas = tiles * config.split_k
    depth = -(-shape.depth // config.block_k // config.split_k) * config.block_k
    loaded = _stage_bytes(shape, config.consumers, config.block_k) * depth // config.block_k
    weights = shape.matrices * shape.outputs * shape.depth * shape.bits // 8
    ctas_of_an_sm = -(-ctas // num_sms())
    streamed = max(
        weights / _MEMORY_RATE, ctas * loaded / _L2_RATE, ctas_of_an_sm * loaded / _SM_RATE
    )
    if shape.bits == 4:
        upcast = shape.matrices * config.consumers * WGMMA_M * depth // 2
        streamed = max(streamed, ctas_of_an_sm * upcast / _UPCAST_RATE)
    partials = 4 * config.split_k * shape.rows * shape.outputs
    return streamed + 2 * partials / _MEMORY_RATE  # written, then read
