"""A pipeline through shared memory: a producer fills its stages by TMA, consumers read them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that are filled and read in turn; both sides count blocks from the first one on.

    Attributes:
        full, empty: barriers, one a stage.
        stages: number of stages.
    """

    full: Any
    empty: Any
    stages: int

    def stage(self, block):
        """The stage of a block, int32."""
        return lax.rem(block, jnp.int32(self.stages))

    def acquire(self, block):
        """The stage of a block, as soon as the consumers have released it."""
        stage = self.stage(block)
        pl.when(block >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        return stage

    def wait(self, block):
        """The stage of a block, as soon as it is filled."""
        stage = self.stage(block)
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, stage) -> None:
        """Let the producer refill a stage."""
        plgpu.barrier_arrive(self.empty.at[stage])

    def fill(self, count, load_weights: Callable, load_rows: Callable, *, early: bool) -> None:
        """Fill blocks 0 to ``count`` - 1 of a CTA that has no others; both get (block, stage).

        early: whether the first weights are loaded before the kernels before have ended.
        """

        def load(block, stage):
            load_weights(block, stage)
            load_rows(block, stage)

        def refill(block, _):
            stage = self.stage(block)
            plgpu.barrier_wait(self.empty.at[stage])
            load(block, stage)

        first = jnp.minimum(count, self.stages)
        if early:
            lax.fori_loop(0, first, lambda i, _: load_weights(i, i), None)
            plgpu.griddepcontrol_wait()
            lax.fori_loop(0, first, lambda i, _: load_rows(i, i), None)
        else:
            lax.fori_loop(0, first, lambda i, _: load(i, i), None)
        lax.fori_loop(first, count, refill, None)
