"""The exchange of shares inside the kernel of the sums: push a share, take all shares.

Words (`mosaic.words`) cross NVLink as relaxed accesses of system scope, 16 bytes each where
the row allows it.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from rjax.pallas_kernels.mosaic.emit import SCALAR, THREADS, add, i32_type, mul, thread_index
from rjax.pallas_kernels.mosaic.words import poll_words, store_words
from rjax.pallas_kernels.residual.peer_buffers import (
    PeerBuffers,
    buffer_address,
    bytes_of,
    scalars_of,
)

_BATCH_WORDS = 32  # words of a thread that are polled together


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange(PeerBuffers):
    """Pushes and takes the float32 shares of a sum.

    Attributes:
        layout: layout of the values of one warpgroup, WG_STRIDED with vectors of 1, 2 or 4.
        columns: number of values of one warpgroup.
    """

    layout: Any
    columns: int

    def push(self, value, region, first, receiver=None) -> None:
        """Write float32 ``value`` to words ``first`` (int32) on of this device's slot.

        It goes to the buffers of all devices, or to that of ``receiver`` (int32).
        """
        to_all = receiver is None
        scalars = (SCALAR,) * 4

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalars, self.layout))
        def emit(_, table, region_, rank_, first_, receiver_, value_):
            region, rank, first, to = scalars_of(region_, rank_, first_, receiver_)
            word = self.word(region, rank, first)
            receivers = range(self.devices) if to_all else [to]
            bases = [buffer_address(table, device) for device in receivers]
            for i, register in enumerate(value_.registers.flat):
                words = _words(register)
                byte = bytes_of(add(word, _element(i, len(words))))
                for base in bases:
                    store_words(arith.addi(base, byte), words, "relaxed.sys.")

        # -0.0 is equal to 0.0, and EMPTY.
        sent = jnp.where(value == 0.0, 0.0, value)
        emit(self.table, region, self.rank, first, jnp.int32(0) if to_all else receiver, sent)

    def take(self, region, first, sender=None):
        """Words ``first`` (int32) on of every device, added from device 0 on; waits for them.

        With ``sender`` (int32), the words of that device alone.

        Returns:
            float32 [columns] in ``layout``.
        """
        senders = self.devices if sender is None else 1

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *(SCALAR,) * 4),
            return_type=plgpu.ShapeDtypeStruct((self.columns,), jnp.float32, layout=self.layout),
        )
        def emit(_, table, region_, rank_, first_, sender_):
            region, rank, first, start = scalars_of(region_, rank_, first_, sender_)
            layout = self.layout.to_mgpu()
            shape = layout.registers_shape((self.columns,))
            size = layout.vec_size
            base = buffer_address(table, rank)
            word = self.word(region, start, first)
            count = int(np.prod(shape))
            batch = max(1, _BATCH_WORDS // (senders * size))
            registers = []
            for begin in range(0, count, batch):
                places = [
                    bytes_of(add(word, add(_element(i, size), other * self.slot)))
                    for i in range(begin, min(count, begin + batch))
                    for other in range(senders)
                ]
                words = poll_words([(arith.addi(base, place), size) for place in places], "sys")
                for i in range(0, len(words), senders * size):
                    registers.append(_sum(words[i : i + senders * size], size))
            flat = np.empty(count, object)
            flat[:] = registers
            return mgpu.FragmentedArray(
                _registers=flat.reshape(shape), _layout=layout, _is_signed=None
            )

        start = jnp.int32(0) if sender is None else sender
        return emit(self.table, region, self.rank, first, start)


def _element(i: int, size: int):
    """Index of the first element of a thread's register ``i`` of ``size`` elements, int32."""
    return add(mul(thread_index(), size), i * THREADS * size)


def numbers_of(register):
    """The elements of a vector."""
    [size] = register.type.shape
    return [vector.extract(register, [], [i]) for i in range(size)]


def _words(register):
    """The float32 elements of a vector as int32."""
    return [arith.bitcast(i32_type(), number) for number in numbers_of(register)]


def _sum(words, size: int):
    """The vector of the sums of ``size`` interleaved numbers: words of device 0 first."""
    f32 = ir.F32Type.get()
    sums = []
    for i in range(size):
        numbers = [arith.bitcast(f32, word) for word in words[i::size]]
        total = numbers[0]
        for number in numbers[1:]:
            total = arith.addf(total, number)
        sums.append(total)
    return vector.from_elements(ir.VectorType.get((size,), f32), sums)
