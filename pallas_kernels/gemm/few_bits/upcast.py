"""Weights of few bits from shared memory to the registers from which wgmma reads its left operand.

A thread loads 32 bits at once, but wgmma wants pairs of neighbours in it. In natural order, the
threads of a quad exchange packed values before they convert them (two shuffles and two permutes for
eight int4). Interleaved values (``interleaving``) need no exchange.

Small floats become bfloat16 by moving their bits: the exponent is then too small by a constant,
which one product corrects, with subnormal numbers too. mxfp4 multiplies by its scale in the same
product. Both are exact.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from rjax.pallas_kernels.gemm.few_bits.interleaving import (
    INTERLEAVED,
    INTERLEAVED_BYTES,
    PAIRS,
    PAIRS_OF_BYTES,
)

_WGMMA = plgpu.Layout.WGMMA
PER_OUTPUT = _WGMMA.reduce(1)
_E4M3_TO_BF16 = 0x7B807B80  # two of 2 ** 120, the difference of the exponents' biases
_E2M1_TO_BF16 = 126  # the same difference as an exponent, for mxfp4
_BIAS = 136  # of an int4 in the mantissa of a bfloat16 with the exponent of 128, sign bit flipped
_BIAS_PAIR = 0x43084308  # two of it


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


def load_fp8(tile, first: int, columns: int):
    """Columns ``first`` to ``first + columns`` of a tile in bfloat16 and WGMMA layout.

    tile: interleaved float8_e4m3fn [64, X] SMEM, tiled and swizzled; without NaN.
    """
    value = plgpu.load(tile, layout=plgpu.Layout.WGMMA_8BIT)[:, first : first + columns]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_8BIT,),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.bfloat16, layout=_WGMMA),
    )
    def upcast(_, packed):
        words = packed.registers.reshape(columns // INTERLEAVED_BYTES, 2)

        def pair(block: int, half: int, which: int):
            return _widened_e4m3(_word(words[block, half]), which)

        return _pairs_to_operand(columns, PAIRS_OF_BYTES, pair)

    return upcast(value)


def load_scaled(tile, first: int, columns: int, scales, *, mxfp4: bool):
    """The same of interleaved values of 4 bits, times their scales: int4, or mxfp4.

    scales: one array for each group of the columns, in PER_OUTPUT layout: bfloat16 [64] for int4,
    uint8 [64] exponents for mxfp4.
    """
    value = plgpu.load(tile, layout=plgpu.Layout.WGMMA_UPCAST_4X)[:, first : first + columns]
    blocks_per_group = columns // len(scales) // INTERLEAVED

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA_UPCAST_4X, *[PER_OUTPUT] * len(scales)),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.bfloat16, layout=_WGMMA),
    )
    def upcast(_, packed, *scales_):
        words = packed.registers.reshape(columns // INTERLEAVED, 2)  # upper and lower 8 rows
        make = _exponent_pair if mxfp4 else _number_pair
        factors = [[make(each) for each in scale.registers.flat] for scale in scales_]
        widen = _widened_e2m1 if mxfp4 else _widened_int4

        def pair(block: int, half: int, which: int):
            return widen(_word(words[block, half]), factors[block // blocks_per_group][half], which)

        return _pairs_to_operand(columns, PAIRS, pair)

    return upcast(value, *scales)


def _word(register):
    return mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))


def _pairs_to_operand(columns: int, pairs_per_word: int, pair):
    """The left operand [64, columns] of pairs of bfloat16, from (block, half, pair of a word)."""
    pair_type, layout = ir.VectorType.get((2,), ir.BF16Type.get()), _WGMMA.to_mgpu()
    registers = np.empty((columns // 8, 2), object)
    for at in range(columns // 8):
        for half in range(2):
            block, which = divmod(at, pairs_per_word)
            registers[at, half] = mgpu.utils.bitcast(pair(block, half, which), pair_type)
    return mgpu.FragmentedArray(
        _registers=registers.reshape(layout.registers_shape((64, columns))),
        _layout=layout,
        _is_signed=None,
    )


def _exponent_pair(register):
    """Two bfloat16 2 ** (e - 127 + 126) of a uint8 e, as a word."""
    i32 = ir.IntegerType.get_signless(32)
    exponent = arith.extui(i32, vector.extract(register, [], [0]))
    biased = arith.addi(exponent, mgpu.c(_E2M1_TO_BF16, i32))
    return arith.muli(biased, mgpu.c(0x00800080, i32))


def _number_pair(register):
    """Two copies of a bfloat16, as a word."""
    i16, i32 = (ir.IntegerType.get_signless(bits) for bits in (16, 32))
    bits = arith.bitcast(i16, vector.extract(register, [], [0]))
    return arith.muli(arith.extui(i32, bits), mgpu.c(0x00010001, i32))


def _widened_e4m3(word, pair: int):
    """Bytes ``pair`` and ``pair + 2`` of a word, as two bfloat16."""
    # Sign to bit 15, exponent and mantissa to bits 10 to 4 of each half. 0xea is (a & b) | c.
    sign, rest = (
        ("mov.b32 s, $1", "shr.u32 r, $1, 4")
        if pair
        else (
            "shl.b32 s, $1, 8",
            "shl.b32 r, $1, 4",
        )
    )
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [word],
        f"""
        {{
        .reg .b32 s, r, factor;
        {sign};
        {rest};
        and.b32 s, s, 0x80008000;
        lop3.b32 r, r, 0x07F007F0, s, 0xea;
        mov.b32 factor, {_E4M3_TO_BF16:#x};
        mul.bf16x2 $0, r, factor;
        }}
        """,
        "=r,r",
    )


def _widened_e2m1(word, factor, pair: int):
    """Nibbles ``pair`` and ``pair + 4`` of a word, as two bfloat16, times ``factor`` (two too)."""
    # Sign to bit 15, exponent and mantissa to bits 8 to 6 of each half.
    shift = 6 - 4 * pair
    rest = f"shl.b32 r, $1, {shift}" if shift > 0 else f"shr.u32 r, $1, {-shift}"
    return llvm.inline_asm(
        ir.IntegerType.get_signless(32),
        [word, factor],
        f"""
        {{
        .reg .b32 s, r;
        shl.b32 s, $1, {12 - 4 * pair};
        {rest};
        and.b32 s, s, 0x80008000;
        lop3.b32 r, r, 0x01C001C0, s, 0xea;
        mul.bf16x2 $0, r, $2;
        }}
        """,
        "=r,r,r",
    )


def _widened_int4(word, factor, pair: int):
    """The same of int4."""
    i32 = ir.IntegerType.get_signless(32)
    value = _unpack(word, mgpu.c(_BIAS_PAIR, i32), pair)
    return llvm.inline_asm(i32, [value, factor], "mul.bf16x2 $0, $1, $2;", "=r,r,r")
