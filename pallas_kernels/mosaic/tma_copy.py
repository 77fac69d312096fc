"""The TMA copy that Pallas emitted last: its L2 policy and its barrier.

Pallas' ``copy_gmem_to_smem`` has no option for the one and does not give the other. Jax 0.11 emits
an operation of MLIR, jax 0.12 a line of PTX.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

_EVICT_FIRST = 0x12F0000000000000  # the policy that createpolicy encodes for evict_first
_OPERATION = nvvm.CpAsyncBulkTensorGlobalToSharedClusterOp.OPERATION_NAME
_LINE, _COMPLETES = "@$0 cp.async.bulk.tensor.", ".mbarrier::complete_tx::bytes"
_BARRIER_OPERAND = 3  # of the line: predicate, shared memory, descriptor, barrier, indices


def evict_first() -> None:
    """Give the last ``copy_gmem_to_smem`` the L2 eviction policy evict_first.

    It is for bytes that are read once per step: they do not evict data that is read again soon.
    Replaces the copy by one with the hint.
    """

    @plgpu.inline_mgpu(arg_types=())
    def hint(_):
        copy = _last_copy()
        policy = mgpu.c(_EVICT_FIRST, ir.IntegerType.get_signless(64))
        if copy.operation.name == _OPERATION:
            nvvm.cp_async_bulk_tensor_shared_cluster_global(
                copy.dstMem,
                copy.tmaDescriptor,
                list(copy.coordinates),
                copy.mbar,
                list(copy.im2colOffsets),
                multicast_mask=copy.multicastMask,
                l2_cache_hint=policy,
                mode=copy.mode,
                is_cta_only=copy.isCTAOnly,
                group=copy.group,
                predicate=copy.predicate,
            )
        else:
            operands = list(copy.operands_)
            line = _line(copy).replace(_COMPLETES, f"{_COMPLETES}.L2::cache_hint")
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [*operands, policy],
                line.rstrip(" ;") + f", ${len(operands)};",
                copy.constraints.value + ",l",
                has_side_effects=True,
            )
        copy.operation.erase()

    hint()


def last_copy_barrier():
    """The barrier of the last ``copy_gmem_to_smem``, a pointer; inside an inlined function."""
    copy = _last_copy()
    if copy.operation.name == _OPERATION:
        return copy.mbar
    return copy.operands_[_BARRIER_OPERAND]


def _last_copy() -> Any:
    copies = [op for op in ir.InsertionPoint.current.block.operations if _is_copy(op)]
    assert copies, "no copy precedes in this block"
    return copies[-1]


def _is_copy(op: Any) -> bool:
    if op.operation.name != llvm.InlineAsmOp.OPERATION_NAME:
        return op.operation.name == _OPERATION
    return _line(op).startswith(_LINE) and f".global{_COMPLETES}" in _line(op)


def _line(op: Any) -> str:
    return op.asm_string.value
