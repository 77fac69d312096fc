"""The scales and zero points that a consumer warpgroup applies to its products.

Weight scales that change along the depth are prefetched into the L2 cache before the first
weights, behind which they would wait for device memory. They are loaded one pipeline stage ahead
and stay in registers until they are used: a few numbers per thread, whose latency is hidden by a
stage's work. Scales of channels are loaded first and used last. Scales of groups of the rows come
with the rows, through shared memory.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from rjax.pallas_kernels.gemm.few_bits.config import WGMMA_M
from rjax.pallas_kernels.mosaic.emit import (
    SCALAR,
    THREADS,
    add,
    address,
    div,
    i32,
    mul,
    rem,
    thread_index,
)

_PER_OUTPUT, _PER_ROW = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_SECTOR = 32  # bytes that the L2 cache fetches at once
PROMOTION = 128
"""Most inputs between two additions in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class StageScales:
    """What changes along the depth, at one pipeline stage, in registers.

    Attributes:
        factors: scales of the weights, one for each (inputs of a step, matrix); None where they are
            constant.
        zero_points: zero points in the order of ``factors``; None without.
        rows: float32 [R], or None where constant.
    """

    factors: list[Any]
    zero_points: list[Any]
    rows: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Scales:
    """Scales of the products of one warpgroup.

    Attributes:
        weight: float [W, X] or [W, X / rows, E / inputs] GMEM.
        zero_points: int8 GMEM of the same shape, or None.
        rows: float32 [1, T rounded up] GMEM, a scale for each row, or None.
        group_rows: float32 [stages, at least R] SMEM, those of a stage's group, or None.
        block: (outputs, inputs) that share a weight's scale.
        first: int32, first output of the warpgroup, a multiple of 64.
        shape: (64, R), the shape of the products.
        row: int32, first row of the tile.
    """

    weight: Any
    zero_points: Any
    rows: Any
    group_rows: Any
    block: tuple[int, int]
    first: Any
    shape: tuple[int, int]
    row: Any

    @property
    def matrices(self) -> int:
        """W."""
        return self.weight.shape[0]

    @property
    def per_stage(self) -> bool:
        """Whether the weights' scales change along the depth."""
        return len(self.weight.shape) == 3

    def step(self, block_k: int) -> int:
        """Inputs of a stage that are multiplied before their products are scaled."""
        return min(PROMOTION, block_k, self.block[1])

    def load(self, depth, block_k: int):
        """``StageScales`` without the rows', as a tuple; the stage starts at input ``depth``."""
        jobs = [
            (at, w) for at in range(0, block_k, self.step(block_k)) for w in range(self.matrices)
        ]
        factors, zero_points = [None] * len(jobs), [None] * len(jobs)
        if self.per_stage:
            factors = [self._of_weight(self.weight, w, depth + at) for at, w in jobs]
        if self.zero_points is not None:
            zero_points = [self._of_weight(self.zero_points, w, depth + at) for at, w in jobs]
        return factors, zero_points

    def prefetch(self, depth, max_depth: int) -> None:
        """Bring what changes along the depth into the L2 cache, from input ``depth`` on.

        depth: int32; max_depth: inputs that the CTA reads at most.
        """
        if self.per_stage and self.block[0] == 1:
            for ref in (self.weight, self.zero_points):
                if ref is not None:
                    groups = min(-(-max_depth // self.block[1]), ref.shape[2])
                    group = lax.div(depth, jnp.int32(self.block[1]))
                    group = jnp.minimum(group, ref.shape[2] - groups)
                    _prefetch_rows(ref, self.first, group, groups)

    def load_last(self):
        """The weights' scales for ``apply_last``."""
        if self.per_stage:
            return [None] * self.matrices
        return [self._of_weight(self.weight, which, 0) for which in range(self.matrices)]

    def of_stage(self, loaded, stage) -> StageScales:
        """``loaded`` with the rows' scales of a stage that has arrived in shared memory."""
        if self.group_rows is None:
            return StageScales(*loaded)
        rows = self.group_rows.at[stage, pl.ds(0, self.shape[1])]
        return StageScales(*loaded, plgpu.load(rows, layout=_PER_ROW, optimized=False))

    def apply(self, products, factor, rows):
        """float32 products [64, R] times the weight's factor and the rows'; each may be None."""
        if factor is not None and not len(factor.shape) and rows is not None:
            factor, rows = None, rows * factor  # fewer multiplications
        if factor is not None:
            if len(factor.shape):
                factor = lax.broadcast_in_dim(factor.astype(jnp.float32), self.shape, [0])
            products = products * factor
        if rows is not None:
            products = products * lax.broadcast_in_dim(rows, self.shape, [1])
        return products

    def apply_last(self, totals, factors):
        """The sums over the depth times the scales that do not change along it.

        factors: the result of ``load_last``.
        """
        rows = None
        if self.rows is not None:
            of_tile = self.rows.at[0, pl.ds(self.row, self.shape[1])]
            rows = plgpu.load(of_tile, layout=_PER_ROW, optimized=False)
        return tuple(self.apply(*each, rows) for each in zip(totals, factors, strict=True))

    def _of_weight(self, ref, which: int, depth):
        outputs, inputs = self.block
        shared = outputs > 1  # by a multiple of 64 outputs, those of the warpgroup
        at = (
            which,
            lax.div(self.first, jnp.int32(outputs)) if shared else pl.ds(self.first, WGMMA_M),
        )
        if len(ref.shape) == 3:
            at = (*at, lax.div(depth, jnp.int32(inputs)))
        if shared:
            return ref[at].astype(jnp.float32)
        return plgpu.load(ref.at[at], layout=_PER_OUTPUT, optimized=False)


def _prefetch_rows(ref, first, group, groups: int) -> None:
    """Bring ``ref[:, first : first + 64, group : group + groups]`` in GMEM into the L2 cache."""
    matrices, outputs, all_groups = ref.shape
    itemsize = ref.dtype.itemsize
    sectors = -(-groups * itemsize // _SECTOR) + 1  # they need not be aligned

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def prefetch(_, ref_, first_, group_):
        [row], [start] = first_.registers.flat, group_.registers.flat
        thread = thread_index()
        row = arith.addi(row, rem(thread, WGMMA_M))
        start = mul(start, itemsize)
        for job in range(0, matrices * sectors, THREADS // WGMMA_M):
            # A thread has one output; the upper half of the threads takes every second sector.
            number = add(div(thread, WGMMA_M), job)
            of_row = arith.addi(row, mul(div(number, sectors), outputs))
            # The last bytes of the slice, where a sector would be behind them.
            offset = mul(rem(number, sectors), _SECTOR)
            offset = arith.minsi(offset, i32(groups * itemsize - 1))
            byte = arith.addi(mul(of_row, all_groups * itemsize), arith.addi(start, offset))
            exists = arith.cmpi(arith.CmpIPredicate.ult, number, i32(matrices * sectors))
            with mgpu.when(exists):
                llvm.inline_asm(
                    ir.Type.parse("!llvm.void"),
                    [address(ref_, byte)],
                    "prefetch.global.L2 [$0];",
                    "l",
                    has_side_effects=True,
                )

    prefetch(ref, first, group)
