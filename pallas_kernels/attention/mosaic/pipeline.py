"""The KV pipeline: a circular buffer of tiles in shared memory between producer and consumers.

A stage holds two [64, H] tiles of K or two of V: tokens 0 to 63 and 64 to 127 of a cooperative
step, or the same 64 tokens of two KV heads in a head-pair step. A step takes two stages, K and then
V. The producer warpgroup fills a stage by TMA and both consumer warpgroups release it; each stage
has a full and an empty barrier. The producer runs ahead over the ends of work tiles, so that memory
stays busy during an epilogue. Bytes of a stage: 2 * 64 * H * itemsize.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True, slots=True)
class KVPipeline:
    """Stages and barriers.

    Attributes:
        halves: [stages, 2, 64, H] SMEM, of the pages' dtype, tiled and swizzled for wgmma.
        whole: the same memory as [stages, 128, H].
        full: barriers [stages]: the tiles of the stage have arrived.
        empty: barriers [stages]: both consumers have read the stage.
        num_stages: static, number of stages.
    """

    halves: Any
    whole: Any
    full: Any
    empty: Any
    num_stages: int

    def stage(self, count):
        """The stage after ``count`` (int32) stages have been used."""
        return lax.rem(count, jnp.int32(self.num_stages))

    def stages_of_step(self, count, step):
        """(K stage, V stage) of a work tile's step; ``count`` stages were used before the tile."""
        return tuple(self.stage(count + 2 * step + n) for n in range(2))

    def producer_acquire(self, stage) -> None:
        """Wait until both consumers have released the stage."""
        plgpu.barrier_wait(self.empty.at[stage])

    def consumer_wait(self, stage) -> None:
        """Wait until the tiles of the stage have arrived."""
        plgpu.barrier_wait(self.full.at[stage])

    def consumer_release(self, stage) -> None:
        """This warpgroup has read the stage."""
        plgpu.barrier_arrive(self.empty.at[stage])
