"""Sum of the devices' shares, residual sum and RMSNorm on Hopper, one launch (Mosaic GPU).

Each device adds its own summands in float32, pushes the sum to others over NVLink, and shares are
added from device 0 on in float32 as they arrive (`peers` has the protocol and why it is correct).
Then it goes on as ``add_rms_norm``. Every device has the sum of the same numbers in the same order,
so all have the same bits.

- One-shot: shares go to all devices, and each adds all of them. 4 * T * D bytes to each other one.
- Two-shot, of many rows on more than two devices: the share of row t goes to device t % devices,
  which adds it and pushes the sum to all. 8 * T * D / devices bytes to each other one.

A CTA handles rows ``cta``, ``cta + CTAs``, ...; it pushes all of its shares before it waits. There
are no more CTAs than SMs, so that all run at once and no device waits for rows that another has not
begun. With few rows, a cluster of two or four CTAs shares each, because one SM would take longer to
push and to poll than the words are under way; the numbers are added in the same order. (Where a GPC
has no room for another cluster of four, an SM has room for several CTAs of one warpgroup.)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rjax.pallas_kernels.kernel import HOPPER, Kernel
from rjax.pallas_kernels.mosaic.emit import THREADS, begin_kernel, num_sms, store_strided
from rjax.pallas_kernels.pending import Partial
from rjax.pallas_kernels.residual.base import ResidualProblem
from rjax.pallas_kernels.residual.exchange import Exchange
from rjax.pallas_kernels.residual.peers import (
    MAX_COLUMNS,
    REGIONS,
    Peers,
    is_two_shot,
    slot_words,
    used_words,
)
from rjax.pallas_kernels.residual.row_sum import leave_cluster, row_sum

_WORDS = 4  # of a load or store: 16 bytes


def refusal(rows: int, D: int, dtype: DTypeLike, capacity: int) -> str | None:
    """Why the kernel cannot take ``rows`` rows of D elements of ``dtype``, or None.

    ``capacity`` is that of `Peers`; 0 without exchange buffers.
    """
    if jnp.dtype(dtype).itemsize != 2:
        return f"x is {jnp.dtype(dtype)}; the mosaic backend needs one 16-bit dtype"
    if D % THREADS or D > MAX_COLUMNS:
        return (
            f"rows of {D} elements; the mosaic backend takes multiples of {THREADS} up to "
            f"{MAX_COLUMNS}"
        )
    if not capacity:
        return "there are no exchange buffers on these devices"
    if rows * D > capacity:
        return (
            f"{rows} rows of {D} elements; with more than {capacity} numbers, XLA's collectives "
            "are as fast"
        )
    return None


def all_reduce_rms_norm(
    x: Float[Array, "T D"], update: Partial, weight: Float[Array, " D"], eps: float, peers: Peers
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Peers]:
    """(x + update, its RMSNorm, peers for the next call), as ``add_rms_norm`` over all devices.

    Runs under ``shard_map``; every device calls it with the same shapes.

    Args:
        x: bfloat16 or float16, the same on every device; D is a multiple of 128.
        update: summands of this device; the update is their sum over all devices. A bias is added
            once.
        weight: any float dtype.
        eps: added to the mean of the squares.
        peers: this device's part of the exchange buffers.

    Raises:
        ValueError: a shape or dtype the kernel does not take.

    Source: root mean square layer normalization, Zhang and Sennrich, 2019.
    """
    if update.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype} and update {update.dtype}; they must be equal")
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _launch("all_reduce_rms_norm", (shape, shape), update, peers, x, weight, eps)


def all_reduce(update: Partial, peers: Peers) -> tuple[Float[Array, "T ..."], Peers]:
    """(the sum over the devices in the dtype of the update, peers for the next call).

    Arguments as in ``all_reduce_rms_norm``; D is the product of the axes after T.
    """
    T, *columns = update.shape
    summands = update.summands.reshape(len(update.summands), T, -1)
    bias = None if update.bias is None else update.bias.reshape(-1)
    flat = Partial(summands, bias, update.dtype)
    shape = jax.ShapeDtypeStruct(flat.shape, update.dtype)
    total, peers = _launch("all_reduce", (shape,), flat, peers, None, None, 0.0)
    return total.reshape(T, *columns), peers


def _warpgroups(D: int) -> tuple[int, int]:
    """(warpgroups of a CTA, elements of a thread's vector)."""
    for warpgroups in (4, 2, 1):
        if D % (warpgroups * THREADS * _WORDS) == 0:
            return warpgroups, _WORDS
    return 1, 2 if D % (2 * THREADS) == 0 else 1


def _ctas_of_a_row(rows: int, warpgroups: int) -> int:
    """CTAs that share a row, each with as many of its warpgroups."""
    return next(n for n in (4, 2, 1) if n == 1 or (n <= warpgroups and n * rows <= num_sms()))


def _launch(name: str, shapes, update: Partial, peers: Peers, x, weight, eps: float):
    X, T, D = update.summands.shape
    why = refusal(T, D, update.dtype, peers.capacity)
    if why is not None:
        raise ValueError(why)
    warpgroups, vector = _warpgroups(D)
    columns = D // warpgroups
    ctas, parts = min(T, num_sms()), _ctas_of_a_row(T, warpgroups)
    of_a_cta = warpgroups // parts
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)
    dtype, normed = update.dtype, weight is not None
    devices, slot = peers.devices, slot_words(peers.devices, peers.capacity)
    two_shot, owned = is_two_shot(devices, T, D), -(-T // devices)
    totals = owned * D  # first word of the sums in a slot, behind the shares
    optional = [array for array in (x, weight, update.bias) if array is not None]

    def kernel(summands_ref, table_ref, state_ref, *refs):
        """GMEM: summands [X, T, D], table [1, devices + 1, 2], state [1, 2]; x [T, D] and weight
        [D] with a norm; bias [D] if there is one; the results [T, D], the next state [1, 2].
        SMEM: scratch [2, 4 * warpgroups of a CTA]."""
        begin_kernel()
        *operands, scratch = refs
        operands, results = operands[: len(optional)], operands[len(optional) :]
        bias_ref = operands[-1] if update.bias is not None else None
        cta, part = lax.axis_index("cta"), lax.axis_index("part")
        wg = part * of_a_cta + lax.axis_index("wg")
        exchange = Exchange(table_ref, devices, slot, layout, columns)
        region, last_words = state_ref[0, 0], state_ref[0, 1]
        first = pl.multiple_of(wg * columns, vector)

        def read(ref):
            part = ref.at[pl.ds(first, columns)]
            return plgpu.load(part, layout=layout).astype(jnp.float32)

        def push(row, _):
            share = read(summands_ref.at[0, row])
            for i in range(1, X):
                share = share + read(summands_ref.at[i, row])
            if two_shot:
                place, owner = row // devices * D + first, lax.rem(row, devices)
                exchange.push(share, region, place, owner)
            else:
                exchange.push(share, region, row * D + first)

        def add_owned(turn, _):
            place = turn * D + first

            @pl.when(turn * devices + exchange.rank < T)
            def _():
                exchange.push(exchange.take(region, place), region, totals + place)

        def finish(row, i):
            addend = scale = None
            if normed:  # loaded before the shares arrive
                x_ref, weight_ref, *_ = operands
                addend, scale = read(x_ref.at[row]), read(weight_ref)
            if two_shot:
                place, owner = totals + row // devices * D + first, lax.rem(row, devices)
                total = exchange.take(region, place, owner).astype(dtype)
            else:
                total = exchange.take(region, row * D + first).astype(dtype)
            if bias_ref is not None:
                total = (total.astype(jnp.float32) + read(bias_ref)).astype(dtype)
            if addend is None:
                [total_ref] = results[:-1]
                store_strided(total_ref.at[row, pl.ds(first, columns)], total, layout)
                return
            residual_ref, normed_ref, _ = results
            residual = (addend + total.astype(jnp.float32)).astype(dtype)
            store_strided(residual_ref.at[row, pl.ds(first, columns)], residual, layout)
            y = residual.astype(jnp.float32)
            total = row_sum(y * y, scratch.at[lax.rem(i, 2)], layout, of_a_cta, parts)
            mean = total * (1.0 / D)
            value = (y * lax.rsqrt(mean + eps) * scale).astype(dtype)
            store_strided(normed_ref.at[row, pl.ds(first, columns)], value, layout)

        _for_rows(push, cta, ctas, T)
        thread = (cta * warpgroups + wg) * THREADS
        before = lax.rem(region + REGIONS - 1, REGIONS)
        exchange.restore(before, last_words, thread, ctas * warpgroups * THREADS)
        if two_shot:
            _for_rows(add_owned, cta, ctas, owned)
        _for_rows(finish, cta, ctas, T)

        @pl.when((cta == 0) & (wg == 0))
        def _():
            results[-1][0, 0] = lax.rem(region + 1, REGIONS)
            results[-1][0, 1] = jnp.int32(used_words(devices, T, D))

        if normed and parts > 1:
            leave_cluster()

    *found, state = plgpu.kernel(
        _named(kernel, name),
        out_type=(*shapes, jax.ShapeDtypeStruct((1, 2), jnp.int32)),
        scratch_types=(plgpu.SMEM((2, 4 * of_a_cta), jnp.float32),),
        grid=(ctas,),
        grid_names=("cta",),
        cluster=(parts,),
        cluster_names=("part",),
        num_threads=of_a_cta,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(update.summands, peers.table, peers.state, *optional)
    return *found, Peers(peers.table, state, peers.capacity)


def _for_rows(body, cta, ctas: int, T: int) -> None:
    """Call ``body(row, i)`` for the rows of a CTA."""
    if ctas == T:
        body(cta, jnp.int32(0))
        return

    def step(i, _):
        row = cta + i * ctas
        pl.when(row < T)(functools.partial(body, row, i))

    lax.fori_loop(0, -(-T // ctas), step, None)


def _named(kernel, name: str):
    kernel.__name__ = f"{name}_kernel"
    return kernel


def _refusal(problem: ResidualProblem) -> str | None:
    return refusal(problem.rows, problem.depth, problem.dtype, problem.peer_capacity)


def _sum(problem: ResidualProblem, update: Partial, peers: Peers) -> tuple[Array, Peers]:
    del problem
    return all_reduce(update, peers)


def _sum_and_norm(
    problem: ResidualProblem, x: Array, update: Partial, weight: Array, peers: Peers
) -> tuple[Array, Array, Peers]:
    return all_reduce_rms_norm(x, update, weight, problem.eps, peers)


KERNELS = tuple(
    Kernel(f"mosaic.{name}", name, "mosaic", _refusal, run, compute_capabilities=HOPPER)
    for name, run in (("all_reduce", _sum), ("all_reduce_rms_norm", _sum_and_norm))
)
