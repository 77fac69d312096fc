"""The KV pipeline: a circular buffer of tiles in shared memory from the producer to the consumers.

A stage holds two [64, H] tiles of K or two of V: tokens 0 to 63 and 64 to 127 of a cooperative
step, or the same 64 tokens of two KV heads in a head-pair step: 2 * 64 * H * itemsize bytes. A step
takes two stages, K and then V. For split heads a stage holds one [64, W] tile with one part of the
dims, and a step takes a stage for each part of K and then of V, because shared memory has no room
for two steps of whole tiles. The producer warpgroup fills a stage by TMA and both consumer
warpgroups release it. The producer runs ahead over the ends of work tiles, so that memory stays
busy during an epilogue.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KV_TILE


@dataclasses.dataclass(frozen=True, slots=True)
class KVPipeline:
    """The pipeline of a CTA.

    Attributes:
        halves: [stages, 2 or 1, 64, W] SMEM, of the pages' dtype, tiled and swizzled for wgmma.
        whole: the same memory as [stages, 128 or 64, W].
        full: barriers [stages]: the tiles of the stage have arrived.
        empty: barriers [stages]: both consumers have read the stage.
        num_stages: static, number of stages.
        parts: static, parts of a head: stages of K, or of V, in a step.
    """

    halves: Any
    whole: Any
    full: Any
    empty: Any
    num_stages: int
    parts: int

    @staticmethod
    def tiles(parts: int) -> int:
        """Tiles of a stage."""
        return CONSUMERS // parts

    @staticmethod
    def copies(page_size: int, parts: int) -> int:
        """TMA copies into a stage. Each one arrives at the full barrier."""
        return KVPipeline.tiles(parts) * (KV_TILE // min(page_size, KV_TILE))

    def stage(self, count):
        """The stage after ``count`` (int32) stages have been used."""
        return lax.rem(count, jnp.int32(self.num_stages))

    @property
    def step_stages(self) -> int:
        """Stages that a step takes."""
        return 2 * self.parts

    def k_stages(self, count, step):
        """The stage of each part of K in a step; ``count`` were used before the work tile."""
        first = count + self.step_stages * step
        return tuple(self.stage(first + part) for part in range(self.parts))

    def v_stages(self, count, step, wg):
        """The stages of V in a step: the one that warpgroup ``wg`` reads, then the others."""
        first = count + self.step_stages * step + self.parts
        if self.parts == 1:
            return (self.stage(first),)
        return self.stage(first + wg), self.stage(first + 1 - wg)

    def producer_acquire(self, stage) -> None:
        """Wait until both consumers have released the stage."""
        plgpu.barrier_wait(self.empty.at[stage])

    def consumer_wait(self, stage) -> None:
        """Wait until the tiles of the stage have arrived."""
        plgpu.barrier_wait(self.full.at[stage])

    def consumer_release(self, stage) -> None:
        """This warpgroup has read the stage."""
        plgpu.barrier_arrive(self.empty.at[stage])
