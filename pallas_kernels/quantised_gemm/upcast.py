"""Integer weights from shared memory to the registers from which wgmma reads its left operand.

A thread loads 32 bits at once, but wgmma wants pairs of neighbours in it. In natural order, the
threads of a quad exchange packed values before they convert them (two shuffles and two permutes for
eight int4). Interleaved int4 (``interleaving``) needs no exchange.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from rjax.pallas_kernels.quantised_gemm.interleaving import INTERLEAVED, PAIRS

_WGMMA = plgpu.Layout.WGMMA
_BIAS = 136  # of an int4 in the mantissa of a bfloat16 with the exponent of 128, sign bit flipped


def load_natural(tile, first: int, columns: int, zero_point, dtype):
    """Columns ``first`` to ``first + columns`` of a tile in ``dtype`` and WGMMA layout.

    tile: int4 or int8 [64, X] SMEM, tiled and swizzled; zero_point: ``dtype`` [64], or None.
    """
    int4 = tile.dtype == jnp.int4
    layout = plgpu.Layout.WGMMA_UPCAST_4X if int4 else plgpu.Layout.WGMMA_UPCAST_2X
    value = plgpu.load(tile, layout=layout)[:, first : first + columns]
    value = plgpu.layout_cast(value, _WGMMA).astype(dtype)
    if zero_point is None:
        return value
    return value - lax.broadcast_in_dim(zero_point, value.shape, [0])


def load_interleaved(tile, first: int, columns: int, zero_point, dtype):
    """The same for interleaved int4 and bfloat16; zero points are from -8 to 119."""
    assert dtype == jnp.bfloat16
    value = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_4X)[:, first : first + columns]
    offset = jnp.full((64, 8), _BIAS, dtype)
    if zero_point is not None:
        offset = lax.broadcast_in_dim(zero_point + _BIAS, (64, 8), [0])
    offset = plgpu.layout_cast(offset, _WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_4X, _WGMMA),
        return_type=plgpu.ShapeDtypeStruct((64, columns), dtype, layout=_WGMMA),
    )
    def upcast(_, packed, offset_):
        i32 = ir.IntegerType.get_signless(32)
        pair_type = ir.VectorType.get((2,), ir.BF16Type.get())
        words = packed.registers.reshape(columns // INTERLEAVED, 2)  # upper and lower 8 rows
        offsets = [mgpu.utils.bitcast(x, i32) for x in offset_.registers.flat]
        layout = _WGMMA.to_mgpu()
        registers = offset_.registers.repeat(columns // 8, axis=1)
        pairs = registers.reshape(columns // 8, 2)
        for block in range(columns // INTERLEAVED):
            for half in range(2):
                word = mgpu.utils.bitcast(words[block, half], i32)
                for pair in range(PAIRS):
                    value = _unpack(word, offsets[half], pair)
                    pairs[block * PAIRS + pair, half] = mgpu.utils.bitcast(value, pair_type)
        shape = layout.registers_shape((64, columns))
        return mgpu.FragmentedArray(
            _registers=pairs.reshape(shape), _layout=layout, _is_signed=None
        )

    return upcast(value, offset)


def _unpack(word, offset, pair: int):
    """Nibbles ``pair`` and ``pair + 4`` of a word, as two bfloat16 minus ``offset`` (two too)."""
    i32 = ir.IntegerType.get_signless(32)
    # 0x6a is (a & b) ^ c: the mask, then the exponent of 128 and the flipped sign bit.
    return llvm.inline_asm(
        i32,
        [word, offset],
        f"""
        {{
        .reg .b32 nibbles, biased;
        shr.u32 nibbles, $1, {4 * pair};
        lop3.b32 biased, nibbles, 0x000F000F, 0x43084308, 0x6a;
        sub.bf16x2 $0, biased, $2;
        }}
        """,
        "=r,r,r",
    )
