"""Helpers that emit MLIR operations inside the Mosaic kernels.

Arrays that a kernel writes in place must never be equal constants of the program that calls it. XLA
merges equal constants into one value. Where it also fuses the kernel with slices of its operands
(``xla_gpu_enable_dynamic_slice_fusion``, seen with jax 0.11.2), the fusion has one operand for both
arrays and thus one buffer, so that the kernel overwrites one array with the other.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

THREADS = 128
"""Threads of a warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())

GLOBAL, SHARED = 1, 3
"""Address spaces of pointers."""

EARLY_STARTS = jax.__version_info__ >= (0, 12)
"""Whether XLA lets kernels of a CUDA graph start before those that they depend on have ended."""

_H200_SMS = 132


def num_sms() -> int:
    """SMs of this process's GPU; those of an H200 without a GPU, for lowering."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H200_SMS


def i32(value):
    """An int32 constant of a number; an MLIR value is returned unchanged."""
    return value if isinstance(value, ir.Value) else mgpu.c(value, i32_type())


def i32_type():
    """The MLIR type int32."""
    return ir.IntegerType.get_signless(32)


def add(value, other):
    """int32 sum of a value and a value or number."""
    return arith.addi(value, i32(other))


def mul(value, by: int):
    """int32 product."""
    return arith.muli(value, i32(by))


def div(value, by: int):
    """int32 quotient of a non-negative value."""
    return arith.divui(value, i32(by))


def rem(value, by: int):
    """int32 remainder of a non-negative value."""
    return arith.remui(value, i32(by))


def address(ref, byte):
    """int64 address of byte ``byte`` (int32 or int64) of the ref."""
    i64 = ir.IntegerType.get_signless(64)
    if byte.type != i64:
        byte = arith.extsi(i64, byte)
    return arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), byte)


def pointer(at, space: int):
    """A pointer to the address ``at`` (int64) in ``GLOBAL`` or ``SHARED`` memory."""
    return llvm.inttoptr(ir.Type.parse(f"!llvm.ptr<{space}>"), at)


def thread_index():
    """int32 index of the thread in its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), mgpu.c(THREADS, ir.IntegerType.get_signless(32)))


def widest_vector(size: int) -> int:
    """Consecutive elements per thread if 128 threads share ``size`` elements: 8, 4, 2 or 1."""
    return next(v for v in (8, 4, 2, 1) if v == 1 or size % (THREADS * v) == 0)


def store_strided(ref, value, layout) -> None:
    """``ref`` = value, with one vector store per register of the layout.

    ref: [size] in GMEM, aligned to the layout's vectors; value: [size] in ``layout`` (WG_STRIDED).
    Pallas' own assignment stores single elements where the compiler cannot prove the alignment.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_, ref_, value_):
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        for i, register in enumerate(value_.registers.flat):
            [vector_size] = register.type.shape
            at = arith.addi(
                arith.muli(thread_index(), mgpu.c(vector_size, i32)),
                mgpu.c(i * THREADS * vector_size, i32),
            )
            size = vector_size * mgpu.utils.bitwidth(register.type.element_type) // 8
            vector.store(register, ref_, [arith.index_cast(index, at)], alignment=size)

    store(ref, value)


def begin_kernel(early_weights: bool = False) -> None:
    """The first statement of a kernel: programmatic dependent launch.

    Lets the kernels behind start, then waits until those that this one depends on have ended. With
    ``early_weights`` it does not wait: the kernel may read weights that no kernel of the program
    writes, and calls ``plgpu.griddepcontrol_wait`` in every thread that reads or writes anything
    else, before it does. All other arrays may still be written, or read, by a kernel before.

    Without ``EARLY_STARTS`` the instructions have no effect.
    """
    plgpu.griddepcontrol_launch_dependents()
    if not early_weights:
        plgpu.griddepcontrol_wait()
