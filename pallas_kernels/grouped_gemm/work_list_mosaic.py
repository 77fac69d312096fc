"""The work list of few pairs in one launch (Mosaic GPU): moe_align_block_size in vLLM.

One CTA of one warpgroup. Each warp takes chunks of 32 pairs: ``match.any`` finds the lanes whose
pairs have the same expert, which gives each pair its rank in the chunk and the chunk's count of
each expert. A prefix sum over the chunks, then one over the experts in whole tiles, gives each pair
its slot. Bytes moved: 4 * (2 * pairs + slots + tiles). XLA takes six kernels for it.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref
from jaxtyping import Array, Int

from rjax.pallas_kernels.grouped_gemm.work_list import WorkList, max_tiles
from rjax.pallas_kernels.mosaic_emit import THREADS, add, div, i32, i32_type, mul, rem, thread_index

_WARP = 32
_WARPS = THREADS // _WARP
_MOST_PAIRS = 1024  # eight of a thread, in registers
_MOST_COUNTS = 32 << 10  # of experts in chunks: 128 KB of shared memory


def refusal(pairs: int, num_experts: int) -> str | None:
    """Why the kernel cannot make the work list of so many pairs, or None."""
    if pairs > _MOST_PAIRS:
        return f"{pairs} pairs; the kernel takes at most {_MOST_PAIRS}"
    if _chunks(pairs) * num_experts > _MOST_COUNTS:
        most = _MOST_COUNTS // _chunks(pairs)
        return f"{num_experts} experts; the kernel takes at most {most} for {pairs} pairs"
    return None


def _chunks(pairs: int) -> int:
    """Chunks of a warp's width, as many for each warp."""
    return _WARPS * -(-pairs // THREADS)


def make_work_list_mosaic(experts: Int[Array, "T X"], num_experts: int, rows: int) -> WorkList:
    """The work list of a routing, as `work_list.make_work_list`.

    Args:
        experts: of each row; ``num_experts`` or more for none.
        num_experts: J.
        rows: of a tile.

    Raises:
        ValueError: sizes the kernel does not take.
    """
    T, X = experts.shape
    pairs = T * X
    why = refusal(pairs, num_experts)
    if why is not None:
        raise ValueError(why)
    tiles = max_tiles(pairs, num_experts, rows)
    slots = tiles * rows

    def work_list_kernel(experts_ref, tile_expert, num_tiles, slot_pair, pair_slot, *scratch):
        """GMEM int32: experts [pairs], tile_expert [tiles], num_tiles [1], slot_pair [slots],
        pair_slot [pairs]. SMEM int32: counts [chunks, J], first_slot [J], warp_tiles [4]."""
        refs = experts_ref, tile_expert, num_tiles, slot_pair, pair_slot, *scratch

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
        def emit(_, *refs_):
            _emit(*refs_, pairs=pairs, num_experts=num_experts, rows=rows, slots=slots)

        emit(*refs)

    def int32(size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32)

    tile_expert, num_tiles, slot_pair, pair_slot = plgpu.kernel(
        work_list_kernel,
        out_type=(int32(tiles), int32(1), int32(slots), int32(pairs)),
        scratch_types=(
            plgpu.SMEM((_chunks(pairs), num_experts), jnp.int32),
            plgpu.SMEM((num_experts,), jnp.int32),
            plgpu.SMEM((_WARPS,), jnp.int32),
        ),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(experts.reshape(-1))
    return WorkList(tile_expert, num_tiles, slot_pair, pair_slot.reshape(T, X))


def _emit(
    experts: ir.Value,
    tile_expert: ir.Value,
    num_tiles: ir.Value,
    slot_pair: ir.Value,
    pair_slot: ir.Value,
    counts: ir.Value,
    first_slot: ir.Value,
    warp_tiles: ir.Value,
    *,
    pairs: int,
    num_experts: int,
    rows: int,
    slots: int,
) -> None:
    """The kernel's code; the refs are those of ``work_list_kernel``."""
    thread, J, chunks = thread_index(), num_experts, _chunks(pairs)
    warp, lane = div(thread, _WARP), rem(thread, _WARP)

    def clear(at):
        _store(i32(0), counts, div(at, J), rem(at, J))

    _for_each(chunks * J, thread, clear)
    _for_each(slots, thread, lambda at: _store(i32(-1), slot_pair, at))
    mgpu.utils.warpgroup_barrier()

    # Of each pair of this thread: (pair, expert or J, chunk, rank in the chunk).
    own = []
    for i in range(chunks // _WARPS):
        chunk = add(warp, i * _WARPS)
        pair = arith.addi(mul(chunk, _WARP), lane)
        exists = _less(pair, pairs)
        found = _load(experts, arith.minsi(pair, i32(pairs - 1)))
        expert = arith.select(exists, arith.minui(found, i32(J)), i32(J))
        same = _ptx("match.any.sync.b32 $0, $1, 0xffffffff;", expert)
        before = arith.andi(same, _ptx("mov.u32 $0, %lanemask_lt;"))
        with mgpu.when(arith.andi(_less(expert, J), _equal(before, 0))):
            _store(_ptx("popc.b32 $0, $1;", same), counts, chunk, expert)
        own.append((pair, expert, chunk, _ptx("popc.b32 $0, $1;", before)))
    mgpu.utils.warpgroup_barrier()

    # Each thread has consecutive experts: pairs of earlier chunks, then tiles of its experts.
    per_thread = -(-J // THREADS)
    of_experts, total = [], i32(0)
    for i in range(per_thread):
        expert = add(mul(thread, per_thread), i)
        valid = _less(expert, J)
        column = arith.minsi(expert, i32(J - 1))

        def scan(chunk, before, column=column, valid=valid):
            count = _load(counts, chunk, column)
            with mgpu.when(valid):
                _store(before, counts, chunk, column)
            return arith.addi(before, count)

        count = mgpu.fori(i32(chunks), i32(0))(scan).result
        tiles = arith.select(valid, div(add(count, rows - 1), rows), i32(0))
        of_experts.append((expert, valid, column, total, tiles))
        total = arith.addi(total, tiles)

    through = total  # inclusive prefix sum over the warp
    for distance in (1, 2, 4, 8, 16):
        through = arith.addi(through, _shifted_up(through, distance))
    with mgpu.when(_equal(lane, _WARP - 1)):
        _store(through, warp_tiles, warp)
    mgpu.utils.warpgroup_barrier()
    first_tile = arith.subi(through, total)
    for other in range(_WARPS - 1):
        earlier = arith.cmpi(arith.CmpIPredicate.ugt, warp, i32(other))
        tiles = _load(warp_tiles, i32(other))
        first_tile = arith.addi(first_tile, arith.select(earlier, tiles, i32(0)))
    with mgpu.when(_equal(thread, THREADS - 1)):
        _store(arith.addi(first_tile, total), num_tiles, i32(0))
    for expert, valid, column, before, tiles in of_experts:
        first = arith.addi(first_tile, before)
        with mgpu.when(valid):
            _store(mul(first, rows), first_slot, column)

        def name(tile, carry, first=first, expert=expert):
            _store(expert, tile_expert, arith.addi(first, tile))
            return carry

        mgpu.fori(tiles, i32(0))(name)
    mgpu.utils.warpgroup_barrier()

    for pair, expert, chunk, rank in own:
        column = arith.minsi(expert, i32(J - 1))
        slot = arith.addi(_load(first_slot, column), _load(counts, chunk, column))
        slot = arith.addi(slot, rank)
        has_expert = _less(expert, J)
        with mgpu.when(has_expert):
            _store(pair, slot_pair, slot)
        with mgpu.when(_less(pair, pairs)):
            _store(arith.select(has_expert, slot, i32(slots)), pair_slot, pair)


def _for_each(count: int, thread, run) -> None:
    """Call ``run`` with every index below ``count``, each by one thread."""

    def step(i, carry):
        at = arith.addi(mul(i, THREADS), thread)
        with mgpu.when(_less(at, count)):
            run(at)
        return carry

    mgpu.fori(i32(-(-count // THREADS)), i32(0))(step)


def _less(value, than: int):
    return arith.cmpi(arith.CmpIPredicate.ult, value, i32(than))


def _equal(value, other: int):
    return arith.cmpi(arith.CmpIPredicate.eq, value, i32(other))


def _load(ref, *at):
    return memref.load(ref, [arith.index_cast(ir.IndexType.get(), each) for each in at])


def _store(value, ref, *at) -> None:
    memref.store(value, ref, [arith.index_cast(ir.IndexType.get(), each) for each in at])


def _ptx(code: str, *operands: Any):
    """The int32 result of one instruction, which all lanes of a warp execute together."""
    constraints = ",".join(["=r"] + ["r"] * len(operands))
    return llvm.inline_asm(i32_type(), list(operands), code, constraints, has_side_effects=True)


def _shifted_up(value, distance: int):
    """The value of the lane ``distance`` below, 0 where there is none."""
    lane = f"shfl.sync.up.b32 $0|below, $1, {distance}, 0, 0xffffffff;"
    return _ptx("{ .reg .pred below; " + lane + " @!below mov.b32 $0, 0; }", value)
