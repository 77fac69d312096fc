"""How a tile of results that fills some of its 64 rows is written."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.attention.mosaic import quads
from pallas_kernels.mosaic_emit import SCALAR


def store_columns(ref, value, start):
    """``ref[row, start + column] = value[row, column]`` where there is such a place.

    ref: [T, F] of 16-bit numbers in GMEM, T and F multiples of 8; value: [64, n] in WGMMA layout,
    of ref's dtype, n a multiple of 16; start: int32, a multiple of 8. Writes 16 or 8 bytes at once.
    """
    T, F = ref.shape
    ragged = F % value.shape[1] != 0

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR))
    def store(_, ref_, value_, start_):
        i32 = ir.IntegerType.get_signless(32)
        [first_column] = start_.registers.flat

        def below(number, limit: int):
            return arith.cmpi(arith.CmpIPredicate.slt, number, mgpu.c(limit, i32))

        for which in range(2 if T > 8 else 1):  # a thread's second row is 8 below its first
            words = [mgpu.utils.bitcast(r, i32) for _, r in quads.registers_of(value_, which)]
            parts = [
                (quads.column_of(first, runs), quads.exchange(words[first : first + runs]))
                for first, runs in quads.blocks(len(words))
            ]
            row = quads.row_of(which)
            line = arith.muli(row, mgpu.c(F, i32))
            with mgpu.when(below(row, T)):
                for column, some in parts:
                    column = arith.addi(first_column, column)
                    place = quads.address(ref_, arith.addi(line, column))
                    if not ragged:
                        quads.write(place, some, 1)
                        continue
                    with mgpu.when(below(column, F)):
                        quads.write(place, some, 1)

    store(ref, value, start)
