"""The row that a CTA multiplies, in shared memory.

Few-bit weights multiply float16, which holds all of theirs, and which they become with few
instructions. Each `GROUP` numbers of the row are divided by a power of two that puts the largest
below 2 ** 15: bfloat16 down to 2 ** -30 of that keep all bits.
"""

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from rjax.pallas_kernels.layer.one_row.threads import across, equal, f32, lane, store
from rjax.pallas_kernels.mosaic.emit import add, div, i32, i32_type, mul

GROUP = 128
"""Numbers that have one power: those that a warp stores, four a lane."""

_PADDED_AFTER, _PADDING = 64, 8  # numbers; four lanes that read 64 apart then use all banks
_EXPONENT = 0x7F800000  # bits of a float32
_SMALLEST = 2.0**-100  # of the largest numbers: both factors are normal
_BELOW = 15  # the largest number is below 2 ** 15
_INVERSE = (2 * 127 + _BELOW - 1) << 23  # minus the exponent bits of a number: their factor


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row for 16-bit weights, or for few-bit weights, whose rows have powers.

    Attributes:
        numbers: SMEM, bfloat16 [columns]; or float16 [`padded` (columns)].
        powers: SMEM, float32 [columns / `GROUP`], or None.
    """

    numbers: Any
    powers: Any = None

    @property
    def refs(self) -> tuple[Any, ...]:
        """The Refs that emitted code takes: ``numbers``, and ``powers`` if there are any."""
        return (self.numbers,) if self.powers is None else (self.numbers, self.powers)


def padded(columns):
    """Place of a column, or of the end; an int or an int32."""
    if isinstance(columns, int):
        return columns + columns // _PADDED_AFTER * _PADDING
    return arith.addi(columns, mul(div(columns, _PADDED_AFTER), _PADDING))


def store_run(refs, at, values) -> None:
    """Store four numbers (float32, rounded to bfloat16) from column ``at`` (int32) on.

    refs: the memrefs of `Row.refs`. With powers, the lanes of a warp store neighbouring runs.
    """
    if len(refs) == 1:
        store(refs[0], [at], values)
        return
    numbers, powers = refs
    largest = f32(0)
    for value in values:
        largest = arith.maximumf(largest, arith.maximumf(value, arith.negf(value)))
    largest = across(largest, (16, 8, 4, 2, 1), arith.maximumf)
    bits = arith.bitcast(i32_type(), arith.maximumf(largest, f32(_SMALLEST)))
    exponent = arith.andi(bits, i32(_EXPONENT))
    factor = arith.bitcast(ir.F32Type.get(), arith.subi(i32(_INVERSE), exponent))
    store(numbers, [padded(at)], [arith.mulf(value, factor) for value in values])
    with mgpu.when(equal(lane(), 0)):
        power = add(exponent, -((_BELOW - 1) << 23))
        power = arith.bitcast(ir.F32Type.get(), power)
        # Not a number if the row has one that is not finite.
        power = arith.addf(power, arith.subf(largest, largest))
        store(powers, [div(at, GROUP)], [power])
