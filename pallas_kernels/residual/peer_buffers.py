"""The exchange buffers of a call, inside a kernel; `peers` has the protocol."""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, scf

from rjax.pallas_kernels.mosaic.emit import SCALAR, add, i32, mul, thread_index
from rjax.pallas_kernels.mosaic.words import EMPTY, store_words

_WORD_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The exchange buffers of a call, inside the kernel.

    Attributes:
        table: GMEM, this device's part of the table of `Peers`, [1, devices + 1, 2].
        devices: number of devices that exchange.
        slot: words of one sender's slot.
    """

    table: Any
    devices: int
    slot: int

    @property
    def rank(self):
        """Index of this device, int32."""
        return self.table[0, self.devices, 0]

    def word(self, region, sender, offset):
        """int32 index of the word ``offset`` (int32) in a sender's slot of a region."""
        slot = add(mul(region, self.devices), sender)
        return add(mul(slot, self.slot), offset)

    def restore(self, region, words, thread, threads: int) -> None:
        """Make the first ``words`` (int32) words of every slot of a region ``EMPTY``.

        thread: index of this warpgroup's first thread among all ``threads`` that share the work.
        """
        scalars = (SCALAR,) * 4

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalars))
        def emit(_, table, region_, rank_, words_, thread_):
            region, rank, words, thread = scalars_of(region_, rank_, words_, thread_)
            base = buffer_address(table, rank)
            start = mul(region, self.devices * self.slot)
            first = mul(add(thread, thread_index()), 4)
            empty = [i32(EMPTY)] * 4
            loop = scf.ForOp(first, words, i32(4 * threads), [])
            with ir.InsertionPoint(loop.body):
                word = add(start, loop.induction_variable)
                for device in range(self.devices):
                    byte = bytes_of(add(word, device * self.slot))
                    store_words(arith.addi(base, byte), empty, "")
                scf.yield_([])

        emit(self.table, region, self.rank, words, thread)


def scalars_of(*values):
    """The MLIR values of scalars in ``SCALAR`` layout."""
    return [value.registers.flat[0] for value in values]


def bytes_of(word):
    """int64 bytes before the word with an int32 index."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.muli(arith.extsi(i64, word), mgpu.c(_WORD_BYTES, i64))


def buffer_address(table, device):
    """int64 address of the buffer of a device (int32 or a number)."""
    index, i64 = ir.IndexType.get(), ir.IntegerType.get_signless(64)
    device = arith.index_cast(index, i32(device))
    zero, one = mgpu.c(0, index), mgpu.c(1, index)
    low, high = (memref.load(table, [zero, device, half]) for half in (zero, one))
    high = arith.shli(arith.extui(i64, high), mgpu.c(32, i64))
    return arith.ori(high, arith.extui(i64, low))
