"""The work list of few pairs in one launch (Mosaic GPU): moe_align_block_size in vLLM.

One CTA of one warpgroup. Each warp takes chunks of 32 pairs: ``match.any`` finds the lanes whose
pairs have the same expert, which gives each pair its rank in the chunk and the chunk's count of
each expert. A prefix sum over the chunks, then one over the experts in whole tiles, gives each pair
its slot. Bytes moved: 4 * (2 * pairs + slots + tiles). XLA takes six kernels for it.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, memref, nvvm
from jaxtyping import Array, Int

from rjax.pallas_kernels.experts.work_list import WorkList, max_tiles
from rjax.pallas_kernels.mosaic.emit import (
    THREADS,
    add,
    begin_kernel,
    div,
    i32,
    i32_type,
    mul,
    rem,
    thread_index,
)

_WARP = 32
_WARPS = THREADS // _WARP
_ALL_LANES = -1  # mask of a warp
_MOST_PAIRS = 1024  # eight of a thread, in registers
_MOST_COUNTS = 32 << 10  # of experts in chunks: 128 KB of shared memory


def refusal(pairs: int, num_experts: int) -> str | None:
    """Why the kernel cannot make the work list of ``pairs`` pairs, or None."""
    if pairs > _MOST_PAIRS:
        return f"{pairs} pairs; the kernel takes at most {_MOST_PAIRS}"
    if _columns(num_experts) > _MOST_COUNTS // _chunks(pairs):
        most = _MOST_COUNTS // _chunks(pairs) // THREADS * THREADS
        return f"{num_experts} experts; the kernel takes at most {most} for {pairs} pairs"
    return None


def _chunks(pairs: int) -> int:
    """Chunks of a warp's width, as many for each warp."""
    return _WARPS * -(-pairs // THREADS)


def _columns(num_experts: int) -> int:
    """Experts, up to a multiple of the threads; those past J have no pairs."""
    return -(-num_experts // THREADS) * THREADS


def make_work_list_mosaic(experts: Int[Array, "T X"], num_experts: int, rows: int) -> WorkList:
    """The work list of a routing, as `work_list.make_work_list`.

    Args:
        experts: the experts of each row; ``num_experts`` or more for none.
        num_experts: J.
        rows: rows of a tile.

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
        pair_slot [pairs]. SMEM int32: counts [chunks, columns], first_slot [columns], warp_tiles
        [4]."""
        begin_kernel()
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
            plgpu.SMEM((_chunks(pairs), _columns(num_experts)), jnp.int32),
            plgpu.SMEM((_columns(num_experts),), jnp.int32),
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
    columns = _columns(J)
    warp, lane = div(thread, _WARP), rem(thread, _WARP)

    def clear(at):
        _store(i32(0), counts, div(at, columns), rem(at, columns))

    _for_each(chunks * columns, thread, clear)
    _for_each(slots, thread, lambda at: _store(i32(-1), slot_pair, at))
    mgpu.utils.warpgroup_barrier()

    # Of each pair of this thread: (pair, expert or J, chunk, rank in the chunk). All matches come
    # before the first branch, so that the compiler cannot move one into it.
    own, matches = [], []
    for i in range(chunks // _WARPS):
        chunk = add(warp, i * _WARPS)
        pair = arith.addi(mul(chunk, _WARP), lane)
        found = _load(experts, arith.minsi(pair, i32(pairs - 1)))
        expert = arith.select(_less(pair, pairs), arith.minui(found, i32(J)), i32(J))
        same = _matching_lanes(expert)
        earlier = arith.andi(same, arith.subi(arith.shli(i32(1), lane), i32(1)))
        matches.append((same, earlier))
        own.append((pair, expert, chunk, math.ctpop(earlier)))
    for (_, expert, chunk, _), (same, earlier) in zip(own, matches, strict=True):
        with mgpu.when(arith.andi(_less(expert, J), _equal(earlier, 0))):
            _store(math.ctpop(same), counts, chunk, expert)
    mgpu.utils.warpgroup_barrier()

    # Each thread has consecutive experts: pairs of earlier chunks, then tiles of its experts. No
    # branch skips those past J: LLVM moved the load of a count past a conditional store to it.
    per_thread = columns // THREADS
    of_experts, total = [], i32(0)
    for i in range(per_thread):
        expert = add(mul(thread, per_thread), i)

        def scan(chunk, before, expert=expert):
            count = _load(counts, chunk, expert)
            _store(before, counts, chunk, expert)
            return arith.addi(before, count)

        count = mgpu.fori(i32(chunks), i32(0))(scan).result
        tiles = div(add(count, rows - 1), rows)
        of_experts.append((expert, total, tiles))
        total = arith.addi(total, tiles)

    through = total  # inclusive prefix sum over the warp
    for distance in (1, 2, 4, 8, 16):
        through = arith.addi(through, _shifted_up(through, lane, distance))
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
    for expert, before, tiles in of_experts:
        first = arith.addi(first_tile, before)
        _store(mul(first, rows), first_slot, expert)

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


def _matching_lanes(value):
    """Mask of the lanes of the warp that have the same int32 value."""
    # nvvm.match_sync loses its attribute when a kernel is serialised (jax 0.11.2).
    form = "match.any.sync.b32 $0, $1, 0xffffffff;"
    return llvm.inline_asm(i32_type(), [value], form, "=r,r", has_side_effects=True)


def _shifted_up(value, lane, distance: int):
    """The value of the lane ``distance`` below, 0 where there is none."""
    found = nvvm.shfl_sync(i32(_ALL_LANES), value, i32(distance), i32(0), nvvm.ShflKind.up)
    return arith.select(_less(lane, distance), i32(0), found)
