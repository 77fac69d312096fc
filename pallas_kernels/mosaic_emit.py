"""Pieces of machine-near code that the elementwise Mosaic kernels share."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

THREADS = 128
"""Threads of a program of one warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())


def thread_index():
    """int32 index of the thread in its program."""
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, ir.IntegerType.get_signless(32)))


def widest_vector(size: int) -> int:
    """Numbers a thread can hold in one run when a program's threads share ``size``: 8, 4, 2, 1."""
    return next(v for v in (8, 4, 2, 1) if v == 1 or size % (THREADS * v) == 0)
