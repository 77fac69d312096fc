"""Sums over the pieces of a product, straight from global memory into registers."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from pallas_kernels.mosaic_emit import SCALAR, THREADS, thread_index, widest_vector
from pallas_kernels.product_chain.split import TILE_N, ProductSplit

_BYTES = 4


def strided(width: int):
    """The layout of ``width`` numbers over a warpgroup, at most 16 bytes of float32 a load."""
    return plgpu.Layout.WG_STRIDED((width,), vec_size=min(4, widest_vector(width)))


def sum_pieces(pieces, split: ProductSplit, row, first, width: int):
    """Columns first : first + width of one row of a product, float32 [width].

    pieces: float32 [X, R, TILE_N] in GMEM, X numbers of pieces. row, first: int32 scalars; first
    and width are multiples of four, and width of THREADS. Always summed in the order of runs.
    """
    layout = strided(width)
    step = min(4, widest_vector(width))
    rows = pieces.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, SCALAR),
        return_type=plgpu.ShapeDtypeStruct((width,), jnp.float32, layout=layout),
    )
    def load(_, pieces_, row_, first_):
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        f32 = ir.F32Type.get()
        kind = ir.VectorType.get((step,), f32)
        [line], [begin] = row_.registers.flat, first_.registers.flat
        base = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(pieces_))
        pointer_type = ir.Type.parse("!llvm.ptr<1>")

        def constant(value: int):
            return mgpu.c(value, i32)

        lane = arith.muli(thread_index(), constant(step))
        zero = vector.broadcast(kind, mgpu.c(0.0, f32))
        tiles = constant(split.depth * split.width)

        def run_of(tile_after):
            place = arith.subi(arith.muli(tile_after, constant(split.runs)), constant(1))
            return arith.divui(place, tiles)

        sums = []
        for register in range(width // (THREADS * step)):
            offset = arith.addi(lane, constant(register * THREADS * step))
            column = arith.addi(begin, offset)
            tile = arith.divui(column, constant(TILE_N))
            inside = arith.remui(column, constant(TILE_N))
            start = arith.muli(tile, constant(split.depth))
            low = run_of(arith.addi(start, constant(1)))
            high = run_of(arith.addi(start, constant(split.depth)))
            total = None
            for extra in range(split.most_pieces):
                run = arith.addi(low, constant(extra))
                number = arith.addi(arith.minui(run, high), tile)
                place = arith.addi(arith.muli(number, constant(rows)), line)
                place = arith.addi(arith.muli(place, constant(TILE_N)), inside)
                address = arith.addi(base, arith.muli(arith.extui(i64, place), mgpu.c(_BYTES, i64)))
                value = llvm.load(kind, llvm.inttoptr(pointer_type, address), alignment=4 * step)
                there = arith.cmpi(arith.CmpIPredicate.ule, run, high)
                value = arith.select(there, value, zero)
                total = value if total is None else arith.addf(total, value)
            sums.append(total)
        result = mgpu.FragmentedArray.splat(mgpu.c(0.0, f32), (width,), layout.to_mgpu())
        result.registers.flat[:] = sums
        return result

    return load(pieces, row, first)


def sum_over_threads(value, width: int, scratch):
    """The sum of float32 [width], laid out by ``strided``, as a scalar; always in the same order.

    scratch: float32 [4] SMEM, the warpgroup's own.
    """

    @plgpu.inline_mgpu(
        arg_types=(strided(width), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
    )
    def emit(_, value_, scratch_):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        total = None
        for register in value_.registers.flat:
            for lane in range(register.type.shape[0]):
                some = vector.extract(
                    register,
                    dynamic_position=[],
                    static_position=ir.DenseI64ArrayAttr.get([lane]),
                )
                total = some if total is None else arith.addf(total, some)
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        warp = arith.divui(thread_index(), mgpu.c(32, i32))
        mgpu.utils.warpgroup_barrier()  # the sum before has been read
        memref.store(total, scratch_, [arith.index_cast(index, warp)])
        mgpu.utils.warpgroup_barrier()
        parts = [memref.load(scratch_, [mgpu.c(i, index)]) for i in range(THREADS // 32)]
        total = parts[0]
        for part in parts[1:]:
            total = arith.addf(total, part)
        return mgpu.FragmentedArray.splat(total, (), mgpu.WGSplatFragLayout(()))

    return emit(value, scratch)
