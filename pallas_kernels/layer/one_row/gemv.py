"""Products of a row in shared memory with blocks of weights, by the consumer threads.

Tensor cores take 16 columns of the weights as the rows of one matrix, and the row as a column of
another, whose other columns are not used. A warp has 16 columns and half of the depth of a block of
64 x 64.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.layer.one_row.sizes import TILE
from rjax.pallas_kernels.layer.one_row.threads import (
    LINE_BYTES,
    barrier,
    below,
    equal,
    f32,
    filled,
    lane,
    load,
    select,
    send,
    shared_address,
    simt,
    store,
    thread,
    warp,
)
from rjax.pallas_kernels.mosaic.emit import add, div, i32_type, mul, rem
from rjax.pallas_kernels.mosaic.words import load_vector

MMA_COLUMNS, _MMA_DEPTH = 16, 16
WARPS_ACROSS = TILE // MMA_COLUMNS
HALVES = 2  # of a block's depth
SUMS = 4  # of a thread and block


BATCHES = (4, 2, 1)
"""Numbers of stages that are multiplied at once, so that their loads overlap."""

CHAINS = 2  # of sums that stages take in turns


def no_sums():
    """Sums of nothing: each chain has four sums for each block of a stage."""
    return filled(CHAINS, 0.0)


def multiplied(sums, stages, row, firsts: tuple):
    """The sums with the products of both blocks of some stages.

    sums: a state. stages: bfloat16 [2, 64, 64] SMEM each, tiled. row: bfloat16 SMEM. firsts: int32,
    two of each stage: the first number of the row that each block is multiplied with.
    """
    count = len(stages)

    def emit(*given):
        stages, row, firsts, chains = given[:count], given[count], given[count + 1 : -1], given[-1]
        column, half = rem(warp(), WARPS_ACROSS), div(warp(), WARPS_ACROSS)
        matrix, line = div(lane(), 8), rem(lane(), 8)
        depth = add(add(mul(half, TILE // HALVES), line), mul(div(matrix, 2), 8))
        run = arith.xori(add(mul(column, 2), rem(matrix, 2)), line)
        offset = arith.addi(mul(depth, LINE_BYTES), mul(run, 16))
        pair = add(mul(half, TILE // HALVES), mul(rem(lane(), 4), 2))
        mgpu.utils.warp_barrier()  # the instructions below are for whole warps
        loaded = []
        for number, stage in enumerate(stages):
            address = arith.addi(shared_address(stage), offset)
            for block in range(2):
                for step in range(TILE // HALVES // _MMA_DEPTH):
                    rows = block * TILE + step * _MMA_DEPTH
                    at = arith.addi(firsts[2 * number + block], add(pair, step * _MMA_DEPTH))
                    weights = _transposed(add(address, rows * LINE_BYTES))
                    pairs = [_pair(row, at), _pair(row, add(at, 8))]
                    place = slice(SUMS * block, SUMS * (block + 1))
                    loaded.append((number % CHAINS, place, weights, pairs))
        for chain, place, weights, pairs in loaded:
            chains[chain][place] = mma(weights, pairs, chains[chain][place])
        return (chains,)

    [sums] = simt(emit, (row,), firsts, (sums,), returns=(CHAINS,), blocks=stages)
    return sums


def _pair(row, at):
    """Two neighbours of the row, from an even place (int32) on, as one int32."""
    [pair] = load_vector("ld.shared", arith.addi(shared_address(row), mul(at, 2)), 1)
    return pair


def _transposed(address):
    """The transposes of four matrices of 8 x 8, of whose 32 lines each lane gives one's address."""
    struct = llvm.StructType.get_literal([i32_type()] * 4)
    found = llvm.inline_asm(
        struct,
        [address],
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r",
        has_side_effects=True,
        convergent=True,
    )
    return [llvm.extractvalue(i32_type(), found, [i]) for i in range(4)]


def mma(weights, pairs, sums, kind: str = "bf16"):
    """Four sums with the products of 16 columns of the weights and the row, 16 deep.

    weights: four pairs, of columns i and i + 8 of the lane 4 i + t, then those 8 deeper. pairs: two
    pairs of the row. sums: four sums, two of each column. kind: dtype of weights and row, bf16 or
    f16.
    """
    number = ir.F32Type.get()
    found = llvm.inline_asm(
        llvm.StructType.get_literal([number] * SUMS),
        [*weights, *pairs, *sums],
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=True,
        convergent=True,
    )
    return [llvm.extractvalue(number, found, [i]) for i in range(SUMS)]


def send_sums(sums, scratch, target, firsts: tuple, factors=None, line_of=None) -> None:
    """Send the sums of 64 columns of each of two blocks, or of one that both blocks are of.

    Args:
        sums: a state.
        scratch: float32 [2, 2, 64] SMEM, by block and half.
        target: int32 [words] GMEM, or float32 [X] GMEM for an output of the kernel.
        firsts: int32, index of the first column of each there.
        factors: a state whose first number is what the column is multiplied with, or None.
        line_of: function from a row of an mma's left operand to its column, of eight; None where
            they are in order.
    """
    count = len(firsts)

    def emit(scratch, target, *rest):
        firsts, (found, *others), factors = rest[:count], rest[count], rest[count + 1 :]
        for other in others:
            found = [arith.addf(a, b) for a, b in zip(found, other, strict=True)]
        column, half = rem(warp(), WARPS_ACROSS), div(warp(), WARPS_ACROSS)
        with mgpu.when(equal(rem(lane(), 4), 0)):
            row = div(lane(), 4)
            at = add(mul(column, MMA_COLUMNS), row if line_of is None else line_of(row))
            for block in range(2):
                low, _, high, _ = found[SUMS * block : SUMS * (block + 1)]
                store(scratch, [block, half, at], [low])
                store(scratch, [block, half, add(at, 8)], [high])
        barrier()
        with mgpu.when(below(thread(), TILE * count)):
            at = rem(thread(), TILE)
            which = div(thread(), TILE)
            value = f32(0)
            for block in range(2 // count):
                for half in range(HALVES):
                    [part] = load(scratch, [add(which, block), half, at], 1)
                    value = arith.addf(value, part)
            for [[factor, *_]] in factors:
                value = arith.mulf(value, factor)
            first = firsts[0] if count == 1 else select(equal(which, 0), *firsts)
            place = arith.addi(first, at)
            if target.type.element_type == i32_type():
                send(target, place, [value])
            else:
                store(target, [place], [value])

    states = (sums,) if factors is None else (sums, factors)
    simt(emit, (scratch, target), firsts, states)
