"""Weights of few bits, which consumers widen to bfloat16 in registers, where wgmma reads them.

While wgmma multiplies the weights of 64 inputs, the next ones are widened. Scales of channels
multiply the sums. Scales of groups multiply the weights: exactly for mxfp4; int4 is rounded once
more, as in a dequantised weight. They come through shared memory with the weights. Scales of blocks
of outputs and inputs multiply the float32 products of a block, as one number for a warpgroup; it is
loaded one stage ahead.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from rjax.pallas_kernels.experts.config import WGMMA_M, GroupedConfig, swizzle_atom
from rjax.pallas_kernels.experts.grouped_weight import GroupedWeight
from rjax.pallas_kernels.experts.left_operand import Item, LeftOperand, Stages
from rjax.pallas_kernels.gemm.few_bits import upcast
from rjax.pallas_kernels.gemm.few_bits.products import zeros
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_STEP = 64  # inputs that are widened while as many are multiplied
_PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)
_ACC = plgpu.WGMMAAccumulatorRef


@dataclasses.dataclass(frozen=True, slots=True)
class WidenedWeights(LeftOperand):
    """A `GroupedWeight` and rows of bfloat16."""

    weight: GroupedWeight

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """See the base class."""
        return self.weight.shape

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Values and scales."""
        return self.weight.values, self.weight.scale

    @property
    def copies(self) -> int:
        """Copies of a stage: one for each matrix, and one for scales of groups."""
        return self.shape[2] + self._has_groups

    @property
    def _has_groups(self) -> bool:
        return self.weight.block is not None and not self.weight.promoted

    @property
    def scale_bytes(self) -> float:
        """Bytes of scales in shared memory for each weight."""
        if not self._has_groups:
            return 0
        assert self.weight.block is not None
        return self.weight.scale.dtype.itemsize / self.weight.block[1]

    def _group(self, block_k: int) -> int:
        """Inputs of a stage that share a scale."""
        assert self.weight.block is not None
        return min(self.weight.block[1], block_k)

    def scratch(self, config: GroupedConfig) -> dict[str, Any]:
        """w_smem [stages, W, 64 * consumers, block_k]; scale_smem [stages, groups of a stage, W,
        64 * consumers]."""
        (_, _, W, _), stages, block_k = self.shape, config.num_stages, config.block_k
        bits, columns = self.weight.bits, config.tile_columns
        atom = swizzle_atom(self.shape[1], bits)
        transforms = (
            plgpu.TilingTransform((8, atom)),
            plgpu.SwizzleTransform(atom * bits // 8),
        )
        shape = (stages, W, columns, block_k)
        scratch = {"w_smem": plgpu.SMEM(shape, self.weight.values.dtype, transforms=transforms)}
        if self._has_groups:
            groups = block_k // self._group(block_k)
            scratch["scale_smem"] = plgpu.SMEM(
                (stages, groups, W, columns), self.weight.scale.dtype
            )
        return scratch

    def copy(self, refs, smem, item: Item, k, stage, full, config: GroupedConfig) -> None:
        """See the base class."""
        (w, scale), block_k = refs, config.block_k
        columns = pl.ds(item.column, config.tile_columns)
        depth = pl.ds(pl.multiple_of(k * block_k, block_k), block_k)
        for which in range(self.shape[2]):
            tile = w.at[item.expert, which, columns, depth]
            plgpu.copy_gmem_to_smem(tile, smem["w_smem"].at[stage, which], full)
            if not config.reuse:
                evict_first()
        if self._has_groups:
            assert self.weight.block is not None
            groups = block_k // self._group(block_k)
            first = lax.div(k * block_k, jnp.int32(self.weight.block[1]))
            tile = scale.at[item.expert, pl.ds(first, groups), :, columns]
            plgpu.copy_gmem_to_smem(tile, smem["scale_smem"].at[stage], full)

    def sums(self, refs, smem, x_smem, item: Item, stages: Stages):
        """See the base class."""
        if self.weight.promoted:
            return self._promoted_sums(refs, smem, x_smem, item, stages)
        W, mine = self.shape[2], pl.ds(item.own, WGMMA_M)
        block_k = x_smem.shape[2]
        jobs = [(at, which) for at in range(0, block_k, _STEP) for which in range(W)]

        def accumulate(*accs):
            def step(k, _):
                stage = stages.wait(k)
                left = self._operand(smem, stage, mine, *jobs[0])
                for (at, which), following in zip(jobs, (*jobs[1:], None), strict=True):
                    rows = x_smem.at[stage, :, pl.ds(at, _STEP)].transpose((1, 0))
                    plgpu.wgmma(accs[which], left, rows)
                    if following is not None:
                        left = self._operand(smem, stage, mine, *following)
                    plgpu.wgmma_wait(0)
                stages.release(k)

            lax.fori_loop(0, stages.blocks, step, None)
            return tuple(acc[...] for acc in accs)

        sums = pl.run_scoped(accumulate, *[_ACC((WGMMA_M, item.rows), jnp.float32)] * W)
        if self.weight.block is not None:
            return sums
        return tuple(
            value * lax.broadcast_in_dim(self._of_channels(refs, item, which), value.shape, [0])
            for which, value in enumerate(sums)
        )

    def _promoted_sums(self, refs, smem, x_smem, item: Item, stages: Stages):
        W, mine = self.shape[2], pl.ds(item.own, WGMMA_M)
        shape, block_k = (WGMMA_M, item.rows), x_smem.shape[2]
        group = self._group(block_k)
        jobs = [(at, which) for at in range(0, block_k, group) for which in range(W)]
        steps = [(at, which) for first, which in jobs for at in range(first, first + group, _STEP)]
        per_job = group // _STEP

        def load_scales(k):
            return [self._of_block(refs, item, which, k * block_k + at) for at, which in jobs]

        def step(k, totals, factors):
            ahead = load_scales(jnp.minimum(k + 1, stages.blocks - 1))
            stage = stages.wait(k)
            totals = list(totals)
            left = self._operand(smem, stage, mine, *steps[0])
            for job, (_, which) in enumerate(jobs):

                def product(acc, left=left, first=job * per_job):
                    for i in range(first, first + per_job):
                        rows = x_smem.at[stage, :, pl.ds(steps[i][0], _STEP)].transpose((1, 0))
                        plgpu.wgmma(acc, left, rows)
                        if i + 1 < len(steps):
                            left = self._operand(smem, stage, mine, *steps[i + 1])
                        if i + 1 < first + per_job:
                            plgpu.wgmma_wait(0)
                    return acc[...], left

                found, left = pl.run_scoped(product, _ACC(shape, jnp.float32))
                totals[which] = totals[which] + found * factors[job]
            stages.release(k)
            return tuple(totals), ahead

        carry = (zeros(shape),) * W, load_scales(jnp.int32(0))
        totals, _ = lax.fori_loop(0, stages.blocks, lambda k, carry: step(k, *carry), carry)
        return totals

    def _operand(self, smem, stage, mine, at: int, which: int):
        """The left operand of the inputs from ``at`` on, bfloat16 [64, 64]."""
        tile = smem["w_smem"].at[stage, which, mine]
        match self.weight.kind:
            case "fp8":
                return upcast.load_fp8(tile, at, _STEP)
            case "int8":
                return upcast.load_natural(tile, at, _STEP, None, jnp.bfloat16)
        if not self._has_groups:
            return upcast.load_interleaved(tile, at, _STEP, None, jnp.bfloat16)
        group = self._group(smem["w_smem"].shape[3])
        scales = [
            self._of_group(smem["scale_smem"].at[stage, first // group, which, mine])
            for first in range(at, at + _STEP, min(group, _STEP))
        ]
        return upcast.load_scaled(tile, at, _STEP, scales, mxfp4=self.weight.kind == "mxfp4")

    def _of_group(self, ref):
        scale = plgpu.load(ref, layout=_PER_OUTPUT, optimized=False)
        return scale if self.weight.kind == "mxfp4" else scale.astype(jnp.bfloat16)

    def _of_channels(self, refs, item: Item, which: int):
        ref = refs[1].at[item.expert, which, pl.ds(item.first, WGMMA_M)]
        return plgpu.load(ref, layout=_PER_OUTPUT, optimized=False).astype(jnp.float32)

    def _of_block(self, refs, item: Item, which: int, depth):
        """The scale of the warpgroup's columns."""
        assert self.weight.block is not None
        outputs, inputs = self.weight.block
        row = lax.div(depth, jnp.int32(inputs))
        column = lax.div(item.first, jnp.int32(outputs))
        return refs[1][item.expert, row, which, column].astype(jnp.float32)
