"""Pieces of machine-near code that the elementwise Mosaic kernels share."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

THREADS = 128
"""Threads of a program of one warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())

GLOBAL, SHARED = 1, 3
"""Memory spaces, as pointers name them."""

_EVICT_FIRST = 0x12F0000000000000  # an L2 access policy, as createpolicy makes it: all of it, first

_H200_MULTIPROCESSORS = 132


def multiprocessors() -> int:
    """Of this process's GPU; an H200's where there is none, for lowering."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def i32(value):
    """An int32 constant; values stay what they are."""
    return value if isinstance(value, ir.Value) else mgpu.c(value, i32_type())


def i32_type():
    """The type of all whole numbers here."""
    return ir.IntegerType.get_signless(32)


def add(value, other):
    """int32 sum, of a value and a value or a number."""
    return arith.addi(value, i32(other))


def mul(value, by: int):
    """int32 product."""
    return arith.muli(value, i32(by))


def div(value, by: int):
    """int32 quotient of what is not negative."""
    return arith.divui(value, i32(by))


def rem(value, by: int):
    """int32 remainder of what is not negative."""
    return arith.remui(value, i32(by))


def address(ref, byte):
    """int64 address of a byte, an int32 or int64 value, after the ref's first."""
    i64 = ir.IntegerType.get_signless(64)
    if byte.type != i64:
        byte = arith.extsi(i64, byte)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), byte)


def pointer(place, space: int):
    """A pointer to an address (int64) in ``GLOBAL`` or ``SHARED`` memory."""
    return llvm.inttoptr(ir.Type.parse(f"!llvm.ptr<{space}>"), place)


def thread_index():
    """int32 index of the thread in its program."""
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, ir.IntegerType.get_signless(32)))


def widest_vector(size: int) -> int:
    """Numbers a thread can hold in one run when a program's threads share ``size``: 8, 4, 2, 1."""
    return next(v for v in (8, 4, 2, 1) if v == 1 or size % (THREADS * v) == 0)


def store_strided(ref, value, layout) -> None:
    """``ref`` = value, in as few accesses as its layout has registers.

    ref: a run of a row in GMEM, in one dimension, at a multiple of the layout's vectors; value: of
    the same length, laid out by ``layout`` (WG_STRIDED). Pallas' own assignment writes number by
    number where the compiler cannot see that alignment.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_, ref_, value_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        for i, register in enumerate(value_.registers.flat):
            [run] = register.type.shape
            at = arith.addi(
                arith.muli(thread_index(), mgpu.c(run, i32)), mgpu.c(i * THREADS * run, i32)
            )
            size = run * mgpu.utils.bitwidth(register.type.element_type) // 8
            vector.store(register, ref_, [arith.index_cast(index, at)], alignment=size)

    store(ref, value)


def evict_first() -> None:
    """Tell the L2 cache to drop first what the last ``copy_gmem_to_smem`` reads.

    For bytes read once a step, so that they do not push out what is read again soon. Pallas has no
    such option; this builds the copy just emitted again with the hint.
    """

    @plgpu.inline_mgpu(arg_types=())
    def hint(_):
        name = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp.OPERATION_NAME
        block = ir.InsertionPoint.current.block
        copies: list[Any] = [op for op in block.operations if op.operation.name == name]
        assert copies, "no copy comes before in this block"
        copy = copies[-1]
        nvvm.cp_async_bulk_tensor_shared_cluster_global(
            copy.dstMem,
            copy.tmaDescriptor,
            list(copy.coordinates),
            copy.mbar,
            list(copy.im2colOffsets),
            multicast_mask=copy.multicastMask,
            l2_cache_hint=mgpu.c(_EVICT_FIRST, ir.IntegerType.get_signless(64)),
            mode=copy.mode,
            is_cta_only=copy.isCTAOnly,
            group=copy.group,
            predicate=copy.predicate,
        )
        copy.operation.erase()

    hint()
