"""Products of a row in shared memory with blocks of few-bit weights, by the consumer threads.

It works as `gemv`, but a block has 64 lines of 128 bytes, a line for each column, and a thread
widens its weights in registers. A warp has 16 columns of a block and one half of each line; lane
4 i + t has run t of 16 bytes of that half, of columns `line_of` (i) of each eight.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from rjax.pallas_kernels.layer.one_row.gemv import (
    CHAINS,
    HALVES,
    MMA_COLUMNS,
    SUMS,
    WARPS_ACROSS,
    mma,
)
from rjax.pallas_kernels.layer.one_row.sizes import TILE
from rjax.pallas_kernels.layer.one_row.smem_row import GROUP, Row, padded
from rjax.pallas_kernels.layer.one_row.stage_scales import StageScales
from rjax.pallas_kernels.layer.one_row.threads import (
    CHUNK,
    LINE_BYTES,
    equal,
    f32,
    fma,
    lane,
    load,
    select,
    shared_address,
    simt,
    thread,
    warp,
)
from rjax.pallas_kernels.layer.one_row.widen import row_pair, row_words, slots, widened
from rjax.pallas_kernels.mosaic.emit import add, div, i32, mul, rem
from rjax.pallas_kernels.mosaic.words import load_vector

BATCHES = (2, 1)
"""Numbers of stages that are multiplied at once, so that their loads overlap."""

_RUN_BYTES, _RUN_WORDS = 16, 4
_LINES = 8  # after which the swizzle repeats


def line_of(row):
    """The column, of eight, that row ``row`` (int32) of an mma's left operand is.

    Neighbouring rows read the same run of lines that differ in bit 2, whose swizzles put it into
    different banks.
    """
    return add(div(row, 2), mul(rem(row, 2), _LINES // 2))


@dataclasses.dataclass(frozen=True, slots=True)
class FewBits:
    """How the weights of a product are stored.

    Attributes:
        values: name of their dtype.
        channels: float [X] GMEM, a scale for each column X of all matrices, or None.
        scales: scales that change along the depth, or None.
    """

    values: str
    channels: Any
    scales: StageScales | None


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage that is filled.

    Attributes:
        blocks: SMEM, 2 x 64 lines of 128 bytes.
        first: int32, the number of the row that its first inputs are multiplied with.
        depth: int32, its first input.
        words: SMEM, the stage's words of `StageScales`; None with scales of channels.
    """

    blocks: Any
    first: Any
    depth: Any
    words: Any = None


def multiplied(sums, stages: list[Stage], row: Row, weights: FewBits, columns: tuple):
    """The sums with the products of both blocks of some stages, without scales of channels.

    sums: a state, as of `gemv.no_sums`. columns: int32, first column of each block.
    """
    values, scales, count = weights.values, weights.scales, len(stages)
    bits = 4 if values == "int4" else 8
    references = () if scales is None else scales.refs
    words = () if scales is None else tuple(stage.words for stage in stages)
    scalars = (*columns, *(x for stage in stages for x in (stage.first, stage.depth)))
    refs = (*row.refs, *words, *references)

    def emit(*given):
        blocks, given = given[:count], given[count:]
        (row, powers, *others), given = given[: len(refs)], given[len(refs) :]
        columns, places, chains = given[:2], given[2:-1], given[-1]
        half = div(warp(), WARPS_ACROSS)
        line, run = line_of(div(lane(), 4)), rem(lane(), 4)
        column = arith.addi(mul(rem(warp(), WARPS_ACROSS), MMA_COLUMNS), line)
        run = arith.addi(run, mul(half, LINE_BYTES // _RUN_BYTES // HALVES))
        offset = mul(column, LINE_BYTES)
        offset = arith.addi(offset, mul(arith.xori(run, line), _RUN_BYTES))
        group = half if bits == 4 else i32(0)
        loaded = []
        for number, stage in enumerate(blocks):
            first, depth = places[2 * number : 2 * number + 2]
            in_row = padded(arith.addi(first, mul(run, _RUN_BYTES * 8 // bits)))
            in_row = arith.addi(shared_address(row), mul(in_row, 2))
            of_row = _words(in_row, 0, row_words(bits))
            start = arith.addi(shared_address(stage), offset)
            lines = [
                [_words(start, at, _RUN_WORDS) for at in (top, top + _LINES * LINE_BYTES)]
                for top in (0, TILE * LINE_BYTES)
            ]
            [power] = load(powers, [arith.addi(div(first, GROUP), group)], 1)
            factors = [[(power, None)] * 2] * 2
            if scales is not None:

                def scaled(block, more, number=number, depth=depth, power=power):
                    of_stage, refs = others[number], others[count:]
                    at = arith.addi(columns[block], add(column, more))
                    place = add(column, more + block * TILE)
                    scale, zero = scales.numbers(of_stage, refs, at, place, depth, half)
                    return arith.mulf(scale, power), zero

                factors = [[scaled(block, more) for more in (0, _LINES)] for block in range(2)]
            loaded.append((of_row, lines, factors))
        mgpu.utils.warp_barrier()  # the instructions below are for whole warps
        for number, (of_row, lines, factors) in enumerate(loaded):
            chain = chains[number % CHAINS]
            for block in range(2):
                found = [f32(0)] * SUMS
                pairs = [
                    [widened(word, values, zero) for word in words]
                    for words, (_, zero) in zip(lines[block], factors[block], strict=True)
                ]
                for slot in slots(bits):
                    left = [side[word][pair] for word, pair in slot for side in pairs]
                    right = [of_row[row_pair(word, pair, bits)] for word, pair in slot]
                    found = mma(left, right, found, "f16")
                for side, (factor, _) in enumerate(factors[block]):
                    at = SUMS * block + 2 * side
                    chain[at] = fma(found[2 * side], factor, chain[at])
        return (chains,)

    blocks = tuple(stage.blocks for stage in stages)
    [sums] = simt(emit, refs, scalars, (sums,), returns=(CHAINS,), blocks=blocks)
    return sums


def channel_scales(scale, columns: tuple):
    """A state whose first number is the scale of the column that a thread sends.

    scale: float [X] GMEM, scales of the columns X of all matrices. columns: int32, first column of
    each block.
    """

    def emit(scale, *columns):
        first = select(equal(rem(div(thread(), TILE), 2), 0), *columns)
        [value] = load(scale, [arith.addi(first, rem(thread(), TILE))], 1)
        return ([[value, *[f32(0)] * (CHUNK - 1)]],)

    [state] = simt(emit, (scale,), tuple(jnp.int32(each) for each in columns), returns=(1,))
    return state


def _words(address, offset: int, count: int) -> list[Any]:
    """int32 words of SMEM."""
    return [
        word
        for at in range(0, count, 4)
        for word in load_vector("ld.shared", address, 4, offset + 4 * at)
    ]
