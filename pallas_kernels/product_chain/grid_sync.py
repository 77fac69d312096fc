"""A barrier over all programs of a launch, for Mosaic GPU kernels whose programs all run at once.

Every barrier is one int32 counter in global memory, zero before the launch. Warpgroups add one when
their writes are done; whoever reads them waits until enough have.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic_emit import SCALAR

_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class GridSync:
    """Counters of one launch: int32 ``counters`` [X, Y] in GMEM, of which row ``row`` is ours.

    ``arrivals`` warpgroups pass each barrier.
    """

    counters: Any
    row: Any
    arrivals: int

    def arrive(self, barrier: int) -> None:
        """Publish what this warpgroup has written to global memory; called by its 128 threads."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def emit(_, counters, row):
            # Copies by the tensor memory accelerator read it too.
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)
            mgpu.utils.warpgroup_barrier()
            self._semaphore(counters, row, barrier).signal(1, memory_scope="gpu")

        emit(self.counters, self.row)

    def wait(self, barrier: int) -> None:
        """Until all have arrived; then this warpgroup sees what they published."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
        def emit(_, counters, row):
            semaphore = self._semaphore(counters, row, barrier)
            semaphore.wait(self.arrivals, decrement=False, memory_scope="gpu")
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

        emit(self.counters, self.row)

    def _semaphore(self, counters, row, barrier: int):
        i64 = ir.IntegerType.get_signless(64)
        [index] = row.registers.flat
        width = self.counters.shape[1]
        start = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(counters))
        place = arith.addi(
            arith.muli(arith.extsi(i64, index), mgpu.c(width * _BYTES, i64)),
            mgpu.c(barrier * _BYTES, i64),
        )
        pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), arith.addi(start, place))
        return mgpu.utils.SemaphoreRef(pointer)
