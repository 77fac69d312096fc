"""What a consumer warpgroup does with one pipeline stage: multiply, scale, accumulate.

The weights are the left operand (64 outputs) and the rows the right one, so that few rows are few
columns of the instruction (swap-AB). Every 128 inputs, the products leave the tensor core and are
added in float32 (promotion): a scale is applied once per group then, and fp8 wgmma, which
accumulates with fewer bits than float32, does so over 128 products only.

With tiles of many rows, scaling products costs more than scaling weights, and needs twice the
registers. 16-bit sums stay in the tensor cores' accumulators then, and group scales multiply the
weights, which are rounded once more.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.gemm.few_bits import upcast
from rjax.pallas_kernels.gemm.few_bits.config import FEW_ROWS
from rjax.pallas_kernels.gemm.few_bits.scales import Scales, StageScales

_SCALED_STEP = 64  # inputs that are converted while as many are multiplied
_ACC = plgpu.WGMMAAccumulatorRef


def zeros(shape: tuple[int, int]):
    """Sums to start from."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def multiply_fp8(totals, w_tiles, x_tile, scales: Scales, now: StageScales):
    """``totals`` plus the products of one stage; all wgmma are done on return.

    totals: W times float32 [64, R]; w_tiles: W times fp8 [64, 128] SMEM; x_tile: fp8 [R, 128] SMEM;
    now: what changes along the depth, at this stage.
    """

    def products(*accs, tiles):
        for acc, tile in zip(accs, tiles, strict=True):
            plgpu.wgmma(acc, tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    totals = list(totals)
    # Registers hold the products of one matrix besides the sums of two, if rows are many.
    at_once = len(totals) if scales.shape[1] <= FEW_ROWS else 1
    for first in range(0, len(totals), at_once):
        chosen = range(first, first + at_once)
        found = pl.run_scoped(
            functools.partial(products, tiles=[w_tiles[which] for which in chosen]),
            *[_ACC(scales.shape, jnp.float32)] * at_once,
        )
        for which, each in zip(chosen, found, strict=True):
            totals[which] = totals[which] + scales.apply(each, now.factors[which], now.rows)
    return tuple(totals)


def multiply_upcast(
    totals, w_tiles, x_tile, scales: Scales, now: StageScales, *, interleaved: bool
):
    """The same for integers [64, block_k], perhaps interleaved, and 16-bit rows [R, block_k].

    The weights are converted in registers, from where wgmma reads them. While it multiplies, the
    next ones are converted.
    """
    block_k, dtype = w_tiles[0].shape[1], x_tile.dtype
    step = scales.step(block_k)
    jobs = [(at, which) for at in range(0, block_k, step) for which in range(len(totals))]
    load = upcast.load_interleaved if interleaved else upcast.load_natural

    def operand(job: int):
        at, which = jobs[job]
        zero = now.zero_points[job]
        if zero is not None:
            zero = zero.astype(dtype)
        return load(w_tiles[which], at, step, zero, dtype)

    totals, left = list(totals), operand(0)
    for job, (at, which) in enumerate(jobs):

        def product(acc, left=left, at=at, following=job + 1):
            plgpu.wgmma(acc, left, x_tile.at[:, pl.ds(at, step)].transpose((1, 0)))
            after = operand(following) if following < len(jobs) else left
            return acc[...], after

        found, left = pl.run_scoped(product, _ACC(scales.shape, jnp.float32))
        totals[which] = totals[which] + scales.apply(found, now.factors[job], None)
    return tuple(totals)


def multiply_scaled(
    accs, w_tiles, x_tile, scales: Scales, now: StageScales, *, interleaved: bool
) -> None:
    """Add the products of one stage to ``accs``, W accumulators; all wgmma are done on return.

    Arguments as in ``multiply_upcast``. The weights are multiplied with their scales.
    """
    block_k, dtype = w_tiles[0].shape[1], x_tile.dtype
    step, W = scales.step(block_k), len(accs)
    jobs = [
        (at, which)
        for first in range(0, block_k, step)
        for which in range(W)
        for at in range(first, first + step, _SCALED_STEP)
    ]
    load = upcast.load_interleaved if interleaved else upcast.load_natural

    def operand(at: int, which: int):
        group = at // step * W + which
        zero = now.zero_points[group]
        if zero is not None:
            zero = zero.astype(dtype)
        value = load(w_tiles[which], at, _SCALED_STEP, zero, dtype)
        scale = now.factors[group]
        if scale is None:
            return value
        return value * lax.broadcast_in_dim(scale.astype(dtype), value.shape, [0])

    left = operand(*jobs[0])
    for (at, which), following in zip(jobs, (*jobs[1:], None), strict=True):
        plgpu.wgmma(accs[which], left, x_tile.at[:, pl.ds(at, _SCALED_STEP)].transpose((1, 0)))
        if following is not None:
            left = operand(*following)
        plgpu.wgmma_wait(0)
