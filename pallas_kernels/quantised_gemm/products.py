"""What a consumer warpgroup does with one pipeline stage: multiply, scale, accumulate.

The weights are the left operand (64 outputs) and the rows the right one, so that few rows are few
columns of the instruction (swap-AB). Every 128 inputs, the products leave the tensor core and are
added in float32: a scale is applied once per group then, and fp8 wgmma, which accumulates with
fewer bits than float32, does so over 128 products only.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.quantised_gemm import upcast
from rjax.pallas_kernels.quantised_gemm.scales import Scales

_ACC = plgpu.WGMMAAccumulatorRef


def zeros(shape: tuple[int, int]):
    """Sums to start from."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def multiply_fp8(totals, w_tiles, x_tile, scales: Scales, loaded):
    """``totals`` plus the products of one stage; all wgmma are done on return.

    totals: W times float32 [64, R]; w_tiles: W times fp8 [64, 128] SMEM; x_tile: fp8 [R, 128] SMEM;
    loaded: from ``scales.load``.
    """

    def products(*accs):
        for acc, tile in zip(accs, w_tiles, strict=True):
            plgpu.wgmma(acc, tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    found = pl.run_scoped(products, *[_ACC(scales.shape, jnp.float32)] * len(totals))
    factors, _ = loaded
    return tuple(
        total + scales.apply(f, factor)
        for total, f, factor in zip(totals, found, factors, strict=True)
    )


def multiply_upcast(totals, w_tiles, x_tile, scales: Scales, loaded, *, interleaved: bool):
    """The same for integers [64, block_k], perhaps interleaved, and 16-bit rows [R, block_k].

    The weights are converted in registers, from where wgmma reads them. While it multiplies, the
    next ones are converted.
    """
    block_k, dtype = w_tiles[0].shape[1], x_tile.dtype
    step = scales.step(block_k)
    jobs = [(at, which) for at in range(0, block_k, step) for which in range(len(totals))]
    load = upcast.load_interleaved if interleaved else upcast.load_natural
    factors, zero_points = loaded

    def operand(job: int):
        at, which = jobs[job]
        zero = zero_points[job]
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
        totals[which] = totals[which] + scales.apply(found, factors[job])
    return tuple(totals)
