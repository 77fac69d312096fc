"""The left operand of a grouped GEMM: how weights reach shared memory and are multiplied."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from rjax.pallas_kernels.experts.config import WGMMA_M, GroupedConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A work item of a CTA.

    Attributes:
        expert, column: int32, the expert and the first column of the CTA's tile.
        own: first of the warpgroup's columns in the tile.
        rows: R.
    """

    expert: Any
    column: Any
    own: Any
    rows: int

    @property
    def first(self):
        """The warpgroup's first column."""
        return pl.multiple_of(self.column + self.own, WGMMA_M)


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages of one work item, as a consumer sees them.

    Attributes:
        first: int32, blocks of the items before.
        blocks: number of blocks of the item.
        count: number of pipeline stages.
        full, empty: barriers, one per stage.
    """

    first: Any
    blocks: int
    count: int
    full: Any
    empty: Any

    def wait(self, k):
        """The stage of block ``k``, when it has arrived."""
        stage = lax.rem(self.first + k, jnp.int32(self.count))
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, k) -> None:
        """Let the producer fill the stage of block ``k`` again."""
        stage = lax.rem(self.first + k, jnp.int32(self.count))
        plgpu.barrier_arrive(self.empty.at[stage])


class LeftOperand(abc.ABC):
    """W matrices of each expert.

    Methods get ``refs``, the operand's ``arrays`` in GMEM, and ``smem``, its ``scratch``.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """(J, D, W, E)."""

    @property
    @abc.abstractmethod
    def arrays(self) -> tuple[Array, ...]:
        """Operands of the kernel."""

    @property
    @abc.abstractmethod
    def copies(self) -> int:
        """Copies of a stage."""

    @abc.abstractmethod
    def scratch(self, config: GroupedConfig) -> dict[str, Any]:
        """Shared memory of all stages."""

    @abc.abstractmethod
    def copy(self, refs, smem, item: Item, k, stage, full, config: GroupedConfig) -> None:
        """Copy block ``k`` of the item's columns; ``full`` is the barrier of the stage."""

    @abc.abstractmethod
    def sums(self, refs, smem, x_smem, item: Item, stages: Stages):
        """The W sums of an item, float32 [64, R]; releases all stages."""
