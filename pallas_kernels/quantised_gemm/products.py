"""What a consumer warpgroup does with one pipeline stage: multiply, scale, accumulate.

The weights are the left operand (64 outputs) and the rows the right one, so that few rows are few
columns of the instruction (swap-AB). Every 128 inputs, the products leave the tensor core and are
added in float32: a scale is applied once per group then, and fp8 wgmma, which accumulates with
fewer bits than float32, does so over 128 products only.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.quantised_gemm.config import WGMMA_M
from rjax.pallas_kernels.quantised_gemm.upcast import load_upcast

_ACC = plgpu.WGMMAAccumulatorRef
_WGMMA = plgpu.Layout.WGMMA
_PER_OUTPUT, _PER_ROW = _WGMMA.reduce(1), _WGMMA.reduce(0)
PROMOTION = 128
"""Inputs between two additions in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the products of one warpgroup.

    Attributes:
        weight: float [W, X] or [W, X / rows, E / inputs] GMEM.
        zero_points: int8 GMEM of the same shape, or None.
        rows: float32 [groups, R] GMEM, or None for rows that are not quantised.
        block: (outputs, inputs) that share a weight's scale.
        first: int32, first output of the warpgroup, a multiple of 64.
        shape: [64, R] of the products.
    """

    weight: Any
    zero_points: Any
    rows: Any
    block: tuple[int, int]
    first: Any
    shape: tuple[int, int]

    @property
    def per_stage(self) -> bool:
        """Whether scales change along the depth."""
        return len(self.weight.shape) == 3 or (self.rows is not None and self.rows.shape[0] > 1)

    def of_products(self, which: int, depth):
        """The factor of products that start at input ``depth`` (int32): a scalar or [64, R]."""
        factor = self._of_weight(self.weight, which, depth)
        if len(factor.shape):
            factor = lax.broadcast_in_dim(factor, self.shape, [0])
        if self.rows is None:
            return factor
        return factor * self._of_rows(depth)

    def zero_point(self, which: int, depth, dtype):
        """The zero points of the 64 outputs in ``dtype``, [64]."""
        return self._of_weight(self.zero_points, which, depth).astype(dtype)

    def _of_rows(self, depth):
        group = lax.div(depth, jnp.int32(PROMOTION)) if self.rows.shape[0] > 1 else 0
        rows = plgpu.load(self.rows.at[group], layout=_PER_ROW, optimized=False)
        return lax.broadcast_in_dim(rows, self.shape, [1])

    def _of_weight(self, ref, which: int, depth):
        outputs, inputs = self.block
        at = (which, pl.ds(self.first, WGMMA_M))
        if outputs > 1:  # a multiple of 64: one scale for the warpgroup
            at = (which, lax.div(self.first, jnp.int32(outputs)))
        if len(ref.shape) == 3:
            at = (*at, lax.div(depth, jnp.int32(inputs)))
        if outputs > 1:
            return ref[at].astype(jnp.float32)
        found = plgpu.load(ref.at[at], layout=_PER_OUTPUT, optimized=False)
        return found if ref.dtype == jnp.int8 else found.astype(jnp.float32)


def zeros(shape: tuple[int, int]):
    """Sums to start from."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)


def multiply_fp8(totals, w_tiles, x_tile, scales: Scales, depth):
    """``totals`` plus the products of one stage, and nothing in flight.

    totals: W times float32 [64, R]; w_tiles: W times fp8 [64, 128] SMEM; x_tile: fp8 [R, 128] SMEM;
    depth: int32, first input of the stage. All scales but those that change along the depth are
    left to ``scale_totals``.
    """
    factors = None
    if scales.per_stage:
        factors = [scales.of_products(which, depth) for which in range(len(totals))]

    def products(*accs):
        for acc, tile in zip(accs, w_tiles, strict=True):
            plgpu.wgmma(acc, tile, x_tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return tuple(acc[...] for acc in accs)

    found = pl.run_scoped(products, *[_ACC(scales.shape, jnp.float32)] * len(totals))
    if factors is not None:
        found = [f * factor for f, factor in zip(found, factors, strict=True)]
    return tuple(total + f for total, f in zip(totals, found, strict=True))


def multiply_upcast(totals, w_tiles, x_tile, scales: Scales, depth):
    """The same for integers [64, block_k] and 16-bit rows [R, block_k].

    The weights are converted in registers, from where wgmma reads them. While it multiplies, the
    next ones are converted.
    """
    block_k, dtype = w_tiles[0].shape[1], x_tile.dtype
    step = min(PROMOTION, block_k, scales.block[1])
    jobs = [(at, which) for at in range(0, block_k, step) for which in range(len(totals))]
    factors = {}
    if scales.per_stage:
        factors = {(at, w): scales.of_products(w, depth + at) for at, w in jobs}

    def operand(at: int, which: int):
        value = load_upcast(w_tiles[which], at, step, dtype)
        if scales.zero_points is not None:
            zero = scales.zero_point(which, depth + at, dtype)
            value = value - lax.broadcast_in_dim(zero, value.shape, [0])
        return value

    totals, operands = list(totals), operand(*jobs[0])
    for job, following in zip(jobs, [*jobs[1:], None], strict=True):
        at, which = job

        def product(acc, at=at, left=operands, following=following):
            right = x_tile.at[:, pl.ds(at, step)].transpose((1, 0))
            plgpu.wgmma(acc, left, right)
            after = left if following is None else operand(*following)
            return acc[...], after

        found, operands = pl.run_scoped(product, _ACC(scales.shape, jnp.float32))
        totals[which] = totals[which] + found * factors.get(job, 1.0)
    return tuple(totals)


def scale_totals(totals, scales: Scales):
    """The sums with the scales that do not change along the depth."""
    if scales.per_stage:
        return totals
    return tuple(t * scales.of_products(which, jnp.int32(0)) for which, t in enumerate(totals))
