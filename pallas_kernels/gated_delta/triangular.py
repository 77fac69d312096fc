"""Inverse of a unit lower triangular matrix [64, 64] in shared memory, in float32, for 128 threads.

The two diagonal blocks of 32 rows are solved by substitution, one column a thread; the block below
them is -T1 L T0, a product in registers. Substitution stays accurate where tokens repeat keys,
while powers of the matrix would grow. Reads and writes SMEM only.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf
from jaxlib.mlir.dialects import math as mlir_math

from rjax.pallas_kernels.mosaic.emit import add, address, div, i32, i32_type, mul, rem, thread_index
from rjax.pallas_kernels.mosaic.words import load_vector, store_vector

ROWS = 64
"""Rows of the matrix."""

PITCH = 72
"""Columns of its shared memory: 8 more than the matrix has, against bank conflicts."""

_BLOCK = 32  # rows of a block, and threads of a warp
_WARPS = 4
_PART = _BLOCK // _WARPS  # rows of a product that a warp computes
_LINE = 4 * PITCH  # bytes
_WIDTH = 4  # elements that one load takes


def invert_unit_lower(matrix) -> None:
    """Replace L by (I + L)^-1; both strictly or unit lower triangular.

    matrix: SMEM float32 [64, PITCH]; elements above the diagonal are ignored and hold anything
    afterwards. The caller synchronises the threads before and after.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def invert(_, matrix_):
        base = arith.trunci(i32_type(), address(matrix_, i32(0)))
        lane, warp = rem(thread_index(), _BLOCK), div(thread_index(), _BLOCK)
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, warp, i32(2))):
            _solve_block(add(base, mul(warp, _BLOCK * (_LINE + 4))), lane)
        mgpu.utils.warpgroup_barrier()
        column, part = mul(lane, 4), mul(warp, _PART * _LINE)
        below = add(add(base, i32(_BLOCK * _LINE)), part)
        _multiply(below, add(base, column), add(add(base, part), add(column, 4 * _BLOCK)), False)
        mgpu.utils.warpgroup_barrier()
        right = add(base, add(column, 4 * _BLOCK))
        _multiply(add(below, 4 * _BLOCK), right, add(below, column), True)

    invert(matrix)


def _solve_block(base, lane) -> None:
    """Invert a diagonal block at an address in place; the lane computes its column."""
    f32 = ir.F32Type.get()
    zero, one = mgpu.c(0.0, f32), mgpu.c(1.0, f32)
    column = []
    for i in range(_BLOCK):
        diagonal = arith.cmpi(arith.CmpIPredicate.eq, lane, i32(i))
        column.append(arith.select(diagonal, one, zero))
    for first in range(0, _BLOCK, _WIDTH):
        for i in range(first + 1, _BLOCK):  # the columns from ``first`` on of each row below
            factors = _floats(base, i * _LINE + 4 * first, _WIDTH)
            for j in range(min(_WIDTH, i - first)):
                column[i] = mlir_math.fma(arith.negf(factors[j]), column[first + j], column[i])
    mgpu.utils.warp_barrier()
    to = add(base, mul(lane, 4))
    for i, value in enumerate(column):
        store_vector("st.shared", to, [mgpu.utils.bitcast(value, i32_type())], i * _LINE)


def _multiply(left, right, target, negate: bool) -> None:
    """``target`` = left @ right, or minus that: a lane's column, a warp's rows.

    left: address of the warp's first row; right, target: addresses of the lane's column.
    """
    index, zero = ir.IndexType.get(), mgpu.c(0.0, ir.F32Type.get())
    bounds = [mgpu.c(n, index) for n in (0, _BLOCK, _WIDTH)]
    loop = scf.ForOp(*bounds, [zero] * _PART)  # a loop, for little code and few registers
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(i32_type(), loop.induction_variable)
        rows, columns = add(left, mul(first, 4)), add(right, mul(first, _LINE))
        sums = list(loop.inner_iter_args)
        column = [_floats(columns, j * _LINE, 1)[0] for j in range(_WIDTH)]
        for i in range(_PART):
            factors = _floats(rows, i * _LINE, _WIDTH)
            for factor, value in zip(factors, column, strict=True):
                sums[i] = mlir_math.fma(factor, value, sums[i])
        scf.yield_(sums)
    for i, value in enumerate(loop.results):
        value = arith.negf(value) if negate else value
        store_vector("st.shared", target, [mgpu.utils.bitcast(value, i32_type())], i * _LINE)


def _floats(at, offset: int, size: int):
    words = load_vector("ld.shared", at, size, offset)
    return [mgpu.utils.bitcast(word, ir.F32Type.get()) for word in words]
