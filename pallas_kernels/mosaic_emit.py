"""Pieces of machine-near code that the elementwise Mosaic kernels share."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

THREADS = 128
"""Threads of a program of one warpgroup."""

MOST_ROWS = 512
"""With more rows than this, products are bound by arithmetic and gain nothing from the cache."""

SCALAR = plgpu.Layout.WG_SPLAT(())
_CHUNK = 4096  # bytes a thread asks for at once


def thread_index():
    """int32 index of the thread in its program."""
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, ir.IntegerType.get_signless(32)))


def prefetch_to_l2(ref, program, programs: int, most_bytes: int) -> None:
    """Ask for the first ``most_bytes`` of a GMEM array in the L2 cache; nobody waits for them.

    Each of ``programs`` programs asks for its share. While the small kernel that calls this and the
    gap behind it last, memory then streams what the next matrix product starts with.
    """
    size = ref.dtype.itemsize
    for length in ref.shape:
        size *= length
    chunks = min(size, most_bytes) // _CHUNK

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def emit(_, ref_, program_):
        index, i32, i64 = ir.IndexType.get(), *map(ir.IntegerType.get_signless, (32, 64))
        [which] = program_.registers.flat
        first = arith.addi(arith.muli(thread_index(), mgpu.c(programs, i32)), which)
        start = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref_))
        loop = scf.ForOp(
            arith.index_cast(index, first),
            mgpu.c(chunks, index),
            mgpu.c(programs * THREADS, index),
        )
        with ir.InsertionPoint(loop.body):
            chunk = arith.index_cast(i64, loop.induction_variable)
            place = arith.addi(start, arith.muli(chunk, mgpu.c(_CHUNK, i64)))
            llvm.inline_asm(
                None,
                [place, mgpu.c(_CHUNK, i32)],
                "cp.async.bulk.prefetch.L2.global [$0], $1;",
                "l,r",
                has_side_effects=True,
            )
            scf.yield_([])

    if chunks:
        emit(ref, program)


def widest_vector(size: int) -> int:
    """Numbers a thread can hold in one run when a program's threads share ``size``: 8, 4, 2, 1."""
    return next(v for v in (8, 4, 2, 1) if v == 1 or size % (THREADS * v) == 0)
