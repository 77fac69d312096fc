"""Few-bit weights as pairs of float16, which holds each of their values exactly.

A thread loads words of 32 bits of a column's neighbours in depth, and tensor cores take pairs of
such neighbours, two at a time (`slots`). Which pair of the row a pair of weights belongs to follows
from their order in memory (`row_pair`): int4 is interleaved (``few_bits.interleaving``), 8
bits are not.
"""

from typing import Any

from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.gemm.few_bits.interleaving import PAIRS, PAIRS_OF_BYTES
from rjax.pallas_kernels.layer.one_row.threads import thread
from rjax.pallas_kernels.mosaic.emit import add, i32, i32_type, mul

_BOTH_HALVES = 0x00010001
_BIASED_BYTES = 0x64646464  # upper bytes of float16: with a byte below, 1024 + it
_BYTES = (0x4140, 0x4342)  # prmt: bytes 0 and 1, or 2 and 3, each below one of those
_BYTE_BIAS = 0x64806480  # float16: 1024 + 128
# A nibble whose first bit is flipped is the number + 8: in bits 0 to 3 of a float16 that is 1024,
# or in bits 4 to 7, where it counts 16-fold.
_LOW, _LOW_BIASED, _LOW_BIAS = 0x000F000F, 0x64086408, 0x6408
_HIGH, _HIGH_BIASED, _HIGH_BIAS = 0x00F000F0, 0x64806480, 0xD480  # the last: -(64 + 8)
_SIXTEENTH = 0x2C002C00


def slots(bits: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Two pairs, each (word, pair in it), of each mma of four words; the row's are neighbours."""
    if bits == 4:
        return [((word, p), (word + 1, p)) for word in (0, 2) for p in range(PAIRS)]
    return [((word, 0), (word, 1)) for word in range(4)]


def row_words(bits: int) -> int:
    """Pairs of four words, which is the number of pairs of the row that they multiply."""
    return 4 * (PAIRS if bits == 4 else PAIRS_OF_BYTES)


def row_pair(word: int, pair: int, bits: int) -> int:
    """The pair of the row that a pair of weights multiplies, of `row_words`."""
    return 4 * pair + word if bits == 4 else PAIRS_OF_BYTES * word + pair


def widened(word, values: str, zero_point=None) -> list[Any]:
    """The pairs of a word (int32), two float16 in an int32 each, the lower one first.

    values: name of the weights' dtype: float8_e4m3fn, int8 or int4. zero_point: int32, -8 to 127,
    what is subtracted from each int4; None for nothing.
    """
    if values == "float8_e4m3fn":
        return _of_e4m3(word)
    if values == "int8":
        word = arith.xori(word, i32(-0x7F7F7F80))  # each byte plus 128
        return [_of_byte(word, order) for order in _BYTES]
    assert values == "int4"
    upper = arith.shrui(word, i32(8))
    return [pair for half in (word, upper) for pair in _of_nibbles(half, zero_point)]


def _of_e4m3(word) -> list[Any]:
    form = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"
    )
    struct = llvm.StructType.get_literal([i32_type()] * 2)
    both = llvm.inline_asm(struct, [word], form, "=r,=r,r", has_side_effects=False)
    return [llvm.extractvalue(i32_type(), both, [i]) for i in range(2)]


def _of_byte(word, order: int):
    biased = _asm("prmt.b32 $0, $1, $2, $3;", word, _held(_BIASED_BYTES), i32(order))
    return _asm("sub.rn.f16x2 $0, $1, $2;", biased, _held(_BYTE_BIAS))


def _of_nibbles(word, zero_point) -> list[Any]:
    """Widened pairs (float16) of bits 0 to 3 and 4 to 7 of both halves of a word."""
    zero = i32(0) if zero_point is None else zero_point
    low_bias = mul(add(zero, _LOW_BIAS), _BOTH_HALVES)
    high_bias = mul(add(mul(zero, 16), _HIGH_BIAS), _BOTH_HALVES)
    low = arith.xori(arith.andi(word, i32(_LOW)), _held(_LOW_BIASED))
    high = arith.xori(arith.andi(word, i32(_HIGH)), _held(_HIGH_BIASED))
    return [
        _asm("sub.rn.f16x2 $0, $1, $2;", low, low_bias),
        _asm("fma.rn.f16x2 $0, $1, $2, $3;", high, _held(_SIXTEENTH), high_bias),
    ]


def _held(number: int):
    """A constant that stays in a register: ptxas would load it anew for each use.

    It has a zero that differs between threads as far as ptxas sees: the count of bits, / 64.
    """
    bits = _asm("popc.b32 $0, $1;", thread())
    return add(arith.shrui(bits, i32(6)), number)


def _asm(form: str, *words):
    constraints = ",".join(["=r", *["r"] * len(words)])
    return llvm.inline_asm(i32_type(), list(words), form, constraints, has_side_effects=False)
