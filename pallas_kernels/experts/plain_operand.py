"""Weights in the dtype of the rows, which wgmma reads in shared memory."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from rjax.pallas_kernels.experts.config import WGMMA_M, GroupedConfig
from rjax.pallas_kernels.experts.left_operand import Item, LeftOperand, Stages
from rjax.pallas_kernels.mosaic.tma_copy import evict_first

_ACC = plgpu.WGMMAAccumulatorRef


@dataclasses.dataclass(frozen=True, slots=True)
class PlainWeights(LeftOperand):
    """Weights [J, D, W, E] in the dtype of the rows."""

    weight: Float[Array, "J D W E"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """See the base class."""
        J, D, W, E = self.weight.shape
        return J, D, W, E

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The weight."""
        return (self.weight,)

    @property
    def copies(self) -> int:
        """Copies of a stage: one for each matrix."""
        return self.shape[2]

    def scratch(self, config: GroupedConfig) -> dict[str, Any]:
        """w_smem [stages, W, block_k, 64 * consumers]."""
        shape = (config.num_stages, self.shape[2], config.block_k, config.tile_columns)
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        return {"w_smem": plgpu.SMEM(shape, self.weight.dtype, transforms=transforms)}

    def copy(self, refs, smem, item: Item, k, stage, full, config: GroupedConfig) -> None:
        """See the base class."""
        (w,), block_k = refs, config.block_k
        depth = pl.ds(pl.multiple_of(k * block_k, block_k), block_k)
        for which in range(self.shape[2]):
            tile = w.at[item.expert, depth, which, pl.ds(item.column, config.tile_columns)]
            plgpu.copy_gmem_to_smem(tile, smem["w_smem"].at[stage, which], full)
            if not config.reuse:
                evict_first()

    def sums(self, refs, smem, x_smem, item: Item, stages: Stages):
        """See the base class; while wgmma of a stage run, those of the next are issued."""
        W, mine = self.shape[2], pl.ds(item.own, WGMMA_M)

        def accumulate(*accs):
            def step(k, _):
                stage = stages.wait(k)
                rows = x_smem.at[stage].transpose((1, 0))
                for which, acc in enumerate(accs):
                    weights = smem["w_smem"].at[stage, which, :, mine].transpose((1, 0))
                    plgpu.wgmma(acc, weights, rows)
                plgpu.wgmma_wait(W)  # the wgmma of the previous stage are done
                pl.when(k > 0)(lambda: stages.release(k - 1))

            lax.fori_loop(0, stages.blocks, step, None)
            plgpu.wgmma_wait(0)
            stages.release(stages.blocks - 1)
            return tuple(acc[...] for acc in accs)

        return pl.run_scoped(accumulate, *[_ACC((WGMMA_M, item.rows), jnp.float32)] * W)
