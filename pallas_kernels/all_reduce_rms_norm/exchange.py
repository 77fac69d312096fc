"""The parts of the exchange inside a kernel: push a share, take all shares, restore ``EMPTY``.

Words (`pallas_kernels.words`) cross NVLink as relaxed accesses of system scope, 16 bytes each where
the row allows it; `peers` has the protocol.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, scf, vector

from rjax.pallas_kernels.mosaic_emit import SCALAR, THREADS, add, i32, i32_type, mul, thread_index
from rjax.pallas_kernels.words import EMPTY, load_vector, poll_words, store_words

_WORD_BYTES = 4
_BATCH_WORDS = 32  # words of a thread that are polled together
_WARP = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange buffers of a call, inside the kernel.

    Attributes:
        table: GMEM, of `Peers`, that of this device: [1, devices + 1, 2].
        devices: that exchange.
        slot: words of one sender's slot.
        layout: of the values of one warpgroup, WG_STRIDED with vectors of 1, 2 or 4.
        columns: values of one warpgroup.
    """

    table: Any
    devices: int
    slot: int
    layout: Any
    columns: int

    @property
    def rank(self):
        """Index of this device, int32."""
        return self.table[0, self.devices, 0]

    def push(self, value, region, first, receiver=None) -> None:
        """Write float32 ``value`` to words ``first`` (int32) on of this device's slot.

        In the buffers of all devices, or in that of ``receiver`` (int32).
        """
        to_all = receiver is None
        scalars = (SCALAR,) * 4

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalars, self.layout))
        def emit(_, table, region_, rank_, first_, receiver_, value_):
            region, rank, first, to = _scalars(region_, rank_, first_, receiver_)
            slot = add(mul(region, self.devices), rank)
            word = add(mul(slot, self.slot), first)
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

        Or the words of the device ``sender`` (int32) alone.

        Returns:
            float32 [columns] in ``layout``.
        """
        senders = self.devices if sender is None else 1

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), *(SCALAR,) * 4),
            return_type=plgpu.ShapeDtypeStruct((self.columns,), jnp.float32, layout=self.layout),
        )
        def emit(_, table, region_, rank_, first_, sender_):
            region, rank, first, start = _scalars(region_, rank_, first_, sender_)
            layout = self.layout.to_mgpu()
            shape = layout.registers_shape((self.columns,))
            size = layout.vec_size
            base = buffer_address(table, rank)
            slot = add(mul(region, self.devices), start)
            word = add(mul(slot, self.slot), first)
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

    def restore(self, region, words, thread, threads: int) -> None:
        """Make the first ``words`` (int32) words of every slot of a region ``EMPTY``.

        thread: index of this warpgroup's first thread among all ``threads`` that share the work.
        """
        scalars = (SCALAR,) * 4

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *scalars))
        def emit(_, table, region_, rank_, words_, thread_):
            region, rank, words, thread = _scalars(region_, rank_, words_, thread_)
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


def row_sum(value, scratch, layout, warpgroups: int, ctas: int):
    """The sum of float32 ``value`` (in ``layout``) over all warpgroups; every thread gets it.

    Of several CTAs, a cluster, each reads the scratch of the others. It must call `leave_cluster`
    before it ends.

    Args:
        value: of this warpgroup.
        scratch: SMEM, float32 [4 * warpgroups]. The next call must have another one: a slow thread
            may still read this one.
        layout: of ``value``.
        warpgroups: of a CTA.
        ctas: that share the row.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR),
    )
    def emit(_, scratch_, value_):
        total = None
        for register in value_.registers.flat:
            for number in _numbers(register):
                total = number if total is None else arith.addf(total, number)
        distance = _WARP // 2
        while distance:
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            distance //= 2
        index = ir.IndexType.get()
        thread = mgpu.utils.thread_idx()
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, i32(_WARP)), i32(0))
        warp = arith.index_cast(index, arith.divui(thread, i32(_WARP)))
        with mgpu.when(is_first):
            memref.store(total, scratch_, [warp])
        if ctas > 1:
            _cluster_barrier("barrier.cluster.arrive.release.aligned;")
            _cluster_barrier("barrier.cluster.wait.acquire.aligned;")
            numbers = [n for cta in range(ctas) for n in _numbers_of(scratch_, cta, 4 * warpgroups)]
            _cluster_barrier("barrier.cluster.arrive.release.aligned;")
        else:
            gpu.barrier()
            numbers = [memref.load(scratch_, [mgpu.c(i, index)]) for i in range(4 * warpgroups)]
        return mgpu.FragmentedArray.splat(functools.reduce(arith.addf, numbers), (), is_signed=None)

    return emit(scratch, value)


def leave_cluster() -> None:
    """Wait until the other CTAs of the cluster have read the scratch of `row_sum`."""

    @plgpu.inline_mgpu()
    def emit(_):
        _cluster_barrier("barrier.cluster.wait.acquire.aligned;")

    emit()


def _cluster_barrier(instruction: str) -> None:
    # Convergent: LLVM would otherwise copy it into both branches of a condition before it.
    void, options = ir.Type.parse("!llvm.void"), {"has_side_effects": True, "convergent": True}
    llvm.inline_asm(void, [], instruction, "~{memory}", **options)


def _numbers_of(scratch, cta: int, count: int):
    """``count`` float32 numbers from the scratch of a CTA of the cluster."""
    place = llvm.ptrtoint(i32_type(), mgpu.utils.memref_ptr(scratch))
    form = "mapa.shared::cluster.u32 $0, $1, $2;"
    place = llvm.inline_asm(i32_type(), [place, i32(cta)], form, "=r,r,r")
    words = [
        word
        for first in range(0, count, 4)
        for word in load_vector("ld.shared::cluster", place, 4, _WORD_BYTES * first)
    ]
    return [arith.bitcast(ir.F32Type.get(), word) for word in words]


def _scalars(*values):
    return [value.registers.flat[0] for value in values]


def _element(i: int, size: int):
    """Index of the first element of a thread's register ``i`` of ``size`` elements, int32."""
    return add(mul(thread_index(), size), i * THREADS * size)


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


def _numbers(register):
    """The elements of a vector."""
    [size] = register.type.shape
    return [vector.extract(register, [], [i]) for i in range(size)]


def _words(register):
    """The float32 elements of a vector as int32."""
    return [arith.bitcast(i32_type(), number) for number in _numbers(register)]


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
