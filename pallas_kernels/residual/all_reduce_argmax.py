"""Index of the largest number of each row over the devices, one launch (Mosaic GPU).

Each device pushes the largest number of its columns and the index of it to all devices, 8 bytes a
row, and compares the pairs as they arrive, from device 0 on: among equal numbers, the first counts.
The exchange is that of the sums (`pallas_kernels.residual.peers`), so no collective of XLA
is left in a decode step, whose devices XLA would have wait for each other on the host.

One thread handles a row. There is a CTA on every SM, because all restore the words of the call
before, which may be as many as those of a sum of many rows.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref
from jaxtyping import Array, Float32, Int32

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    add,
    begin_kernel,
    i32,
    i32_type,
    mul,
    num_sms,
    thread_index,
)
from rjax.pallas_kernels.mosaic.words import EMPTY, poll_words, store_words
from rjax.pallas_kernels.residual.base import ResidualProblem, local_argmax
from rjax.pallas_kernels.residual.peer_buffers import (
    PeerBuffers,
    buffer_address,
    bytes_of,
    scalars_of,
)
from rjax.pallas_kernels.residual.peers import REGIONS, Peers, slot_words

_PAIR = 2  # words of a row: the bits of the number, and the index


def refusal(rows: int, capacity: int) -> str | None:
    """Why the kernel cannot take ``rows`` rows, or None. ``capacity`` is that of `Peers`, or 0."""
    if not capacity:
        return "there are no exchange buffers on these devices"
    most = min(capacity // _PAIR, THREADS * num_sms())
    if rows > most:
        return f"{rows} rows; it takes at most {most}"
    return None


def all_reduce_argmax(
    values: Float32[Array, " B"], indices: Int32[Array, " B"], peers: Peers
) -> tuple[Int32[Array, " B"], Peers]:
    """(the index of the largest value of each row over the devices, peers for the next call).

    Among equal values, the first device's counts. Runs under ``shard_map``; every device calls it
    with the same shapes.

    Args:
        values: largest value of each row on this device; not NaN.
        indices: indices of ``values``, at least 0.
        peers: this device's part of the exchange buffers.

    Raises:
        ValueError: more rows than the kernel takes.
    """
    [B] = values.shape
    why = refusal(B, peers.capacity)
    if why is not None:
        raise ValueError(why)
    devices, slot = peers.devices, slot_words(peers.devices, peers.capacity)
    assert slot >= _PAIR * B
    ctas = num_sms()

    def all_reduce_argmax_kernel(values_ref, indices_ref, table_ref, state_ref, *results):
        """GMEM: values and indices [B], table [1, devices + 1, 2], state [1, 2]; the results [B],
        the next state [1, 2]."""
        begin_kernel()
        result_ref, next_ref = results
        cta = lax.axis_index("cta")
        buffers = PeerBuffers(table_ref, devices, slot)
        region, last_words = state_ref[0, 0], state_ref[0, 1]
        scalars = (cta, region, buffers.rank)
        _push(buffers, values_ref, indices_ref, *scalars)
        before = lax.rem(region + REGIONS - 1, REGIONS)
        buffers.restore(before, last_words, cta * THREADS, ctas * THREADS)
        _take(buffers, result_ref, *scalars)

        @pl.when(cta == 0)
        def _():
            next_ref[0, 0] = lax.rem(region + 1, REGIONS)
            next_ref[0, 1] = jnp.int32(_PAIR * B)

    result, state = plgpu.kernel(
        all_reduce_argmax_kernel,
        out_type=(jax.ShapeDtypeStruct((B,), jnp.int32), jax.ShapeDtypeStruct((1, 2), jnp.int32)),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(values, indices, peers.table, peers.state)
    return result, Peers(peers.table, state, peers.capacity)


def _push(buffers: PeerBuffers, values, indices, cta, region, rank) -> None:
    """Write the pair of this thread's row to this device's slot in the buffers of all devices."""
    [B] = values.shape

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, *(SCALAR,) * 3))
    def emit(_, values_, indices_, table_, *scalars_):
        cta, region, rank = scalars_of(*scalars_)
        row, is_row = _row(cta, B)
        with mgpu.when(is_row):
            at = [arith.index_cast(ir.IndexType.get(), row)]
            bits = arith.bitcast(i32_type(), memref.load(values_, at))
            is_empty = arith.cmpi(arith.CmpIPredicate.eq, bits, i32(EMPTY))
            bits = arith.select(is_empty, i32(0), bits)  # -0.0 is equal to 0.0
            pair = [bits, memref.load(indices_, at)]
            place = bytes_of(buffers.word(region, rank, mul(row, _PAIR)))
            for receiver in range(buffers.devices):
                address = arith.addi(buffer_address(table_, receiver), place)
                store_words(address, pair, "relaxed.sys.")

    emit(values, indices, buffers.table, cta, region, rank)


def _take(buffers: PeerBuffers, result, cta, region, rank) -> None:
    """Wait for the pairs of this thread's row, and store the index of the largest number."""
    [B] = result.shape

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 2, *(SCALAR,) * 3))
    def emit(_, result_, table_, *scalars_):
        cta, region, rank = scalars_of(*scalars_)
        row, is_row = _row(cta, B)
        with mgpu.when(is_row):
            own = buffer_address(table_, rank)
            places = [
                bytes_of(buffers.word(region, i32(sender), mul(row, _PAIR)))
                for sender in range(buffers.devices)
            ]
            words = poll_words([(arith.addi(own, place), _PAIR) for place in places], "sys")
            numbers = [arith.bitcast(ir.F32Type.get(), word) for word in words[::_PAIR]]
            largest, index = numbers[0], words[1]
            for number, other in zip(numbers[1:], words[1 + _PAIR :: _PAIR], strict=True):
                is_larger = arith.cmpf(arith.CmpFPredicate.OGT, number, largest)
                largest = arith.select(is_larger, number, largest)
                index = arith.select(is_larger, other, index)
            memref.store(index, result_, [arith.index_cast(ir.IndexType.get(), row)])

    emit(result, buffers.table, cta, region, rank)


def _row(cta, B: int):
    """(int32 row of this thread, whether there is one)."""
    row = add(mul(cta, THREADS), thread_index())
    return row, arith.cmpi(arith.CmpIPredicate.slt, row, i32(B))


def _refusal(problem: ResidualProblem) -> str | None:
    return refusal(problem.rows, problem.peer_capacity)


def _run(problem: ResidualProblem, x: Array, peers: Peers) -> tuple[Array, Peers]:
    assert problem.axis is not None
    return all_reduce_argmax(*local_argmax(x, problem.axis), peers)


KERNEL = Kernel(
    "mosaic.all_reduce_argmax",
    "all_reduce_argmax",
    "mosaic",
    _refusal,
    _run,
    compute_capabilities=HOPPER,
)
