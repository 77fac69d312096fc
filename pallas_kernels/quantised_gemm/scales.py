"""The scales and zero points that a consumer warpgroup applies to its products.

Those that change along the depth are loaded from GMEM one pipeline stage ahead and stay in
registers until they are used: a few numbers per thread, whose latency is hidden by a stage's work.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.quantised_gemm.config import WGMMA_M

_PER_OUTPUT, _PER_ROW = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
PROMOTION = 128
"""Most inputs between two additions in float32."""


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
        row: int32, first row of the tile.
    """

    weight: Any
    zero_points: Any
    rows: Any
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
        """Whether the scales of the products change along the depth."""
        return len(self.weight.shape) == 3 or (self.rows is not None and self.rows.shape[0] > 1)

    def step(self, block_k: int) -> int:
        """Inputs of a stage that are multiplied before their products are scaled."""
        return min(PROMOTION, block_k, self.block[1])

    def load(self, depth, block_k: int):
        """(factors, zero points) of the stage that starts at input ``depth`` (int32).

        Lists over (inputs of a step, matrix); see ``apply``. Entries are None where nothing changes
        along the depth.
        """
        jobs = [
            (at, w) for at in range(0, block_k, self.step(block_k)) for w in range(self.matrices)
        ]
        factors, zero_points = [None] * len(jobs), [None] * len(jobs)
        if self.per_stage:
            factors = [self._factors(w, depth + at) for at, w in jobs]
        if self.zero_points is not None:
            zero_points = [self._of_weight(self.zero_points, w, depth + at) for at, w in jobs]
        return factors, zero_points

    def apply(self, products, factors):
        """float32 products [64, R] times what ``load`` found for them."""
        if factors is None:
            return products
        of_weight, of_rows = factors
        if len(of_weight.shape):
            of_weight = lax.broadcast_in_dim(of_weight.astype(jnp.float32), self.shape, [0])
        products = products * of_weight
        if of_rows is None:
            return products
        return products * lax.broadcast_in_dim(of_rows, self.shape, [1])

    def apply_last(self, totals):
        """The sums over the depth times the scales that do not change along it."""
        if self.per_stage:
            return totals
        factors = [self._factors(which, jnp.int32(0)) for which in range(self.matrices)]
        return tuple(self.apply(total, f) for total, f in zip(totals, factors, strict=True))

    def _factors(self, which: int, depth):
        return self._of_weight(self.weight, which, depth), self._of_rows(depth)

    def _of_rows(self, depth):
        if self.rows is None:
            return None
        group = lax.div(depth, jnp.int32(PROMOTION)) if self.rows.shape[0] > 1 else 0
        rows = self.rows.at[group, pl.ds(self.row, self.shape[1])]
        return plgpu.load(rows, layout=_PER_ROW, optimized=False)

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
