"""What one CTA works with: configuration, shapes, memory, KV pipeline and tile scheduler.

A CTA is three warpgroups: two consumers and a producer. All three run ``Cta.for_each_tile`` over
the same work tiles and count the same pipeline stages, so they meet only at barriers. Each reads a
record of 32 bytes from GMEM a work tile.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, WGMMA_M, KernelConfig
from rjax.pallas_kernels.attention.mosaic.memory import GlobalMemory, KernelShape, SharedMemory
from rjax.pallas_kernels.attention.mosaic.pipeline import KVPipeline
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import TileScheduler
from rjax.pallas_kernels.attention.mosaic.work_tile import NUM_FIELDS, WorkTile


@dataclasses.dataclass(frozen=True, slots=True)
class Cta:
    """State that all work tiles of a CTA share. ``wg`` is the int32 index of the warpgroup."""

    cfg: KernelConfig
    shape: KernelShape
    gmem: GlobalMemory
    smem: SharedMemory
    pipeline: KVPipeline
    scheduler: TileScheduler
    wg: Any

    def for_each_tile(self, run: Callable[[WorkTile, Any, Any], None]) -> None:
        """``run(tile, q_stage, kv_count)`` for each work tile of this CTA.

        ``q_stage`` is the int32 query buffer of the work tile, ``kv_count`` the int32 number of
        pipeline stages used before it.
        """
        q_stages = self.cfg.q_stages
        first = self._read_record(jnp.int32(0))

        def step(number, carry):
            kv_count, record = carry
            following = self._read_record(number + 1)
            q_stage = lax.rem(number, jnp.int32(q_stages))
            tile = WorkTile.decode(record, self.shape.lists)
            run(tile, q_stage, kv_count)
            return kv_count + 2 * tile.num_steps, following

        lax.fori_loop(0, self.scheduler.num_tiles, step, (jnp.int32(0), first))

    def _read_record(self, number) -> tuple[Any, ...]:
        """The record of a work tile; read one tile ahead, which hides its latency."""
        work_tiles = self.gmem.work_tiles
        index = jnp.minimum(self.scheduler.tile_index(number), work_tiles.shape[0] - 1)
        return tuple(work_tiles[index, field] for field in range(NUM_FIELDS))


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerTile:
    """A work tile as one consumer warpgroup sees it.

    Attributes:
        cta, tile: the CTA and the work tile that all its warpgroups share.
        q_stage, kv_count: int32, the arguments of ``run`` in ``Cta.for_each_tile``.
        q_buffer: int32, the warpgroup's query buffer.
        kv_head: int32; the last head where a head pair has no second one.
        v_scale: float32 scalar, the scale of V in fp8 pages with one scale a KV head; else None.
    """

    cta: Cta
    tile: WorkTile
    q_stage: Any
    kv_count: Any
    q_buffer: Any
    kv_head: Any
    v_scale: Any

    @classmethod
    def of(cls, cta: Cta, tile: WorkTile, q_stage, kv_count) -> "ConsumerTile":
        """The view of warpgroup ``cta.wg``."""
        q_buffer = q_stage * CONSUMERS + cta.wg
        paired_head = jnp.minimum(tile.head + cta.wg, cta.shape.K - 1)
        kv_head = jnp.where(tile.cooperative, tile.head, paired_head)
        v_scales, v_scale = cta.gmem.v_scales, None
        if v_scales is not None and len(v_scales.shape) == 1:
            v_scale = v_scales[kv_head]
        return cls(cta, tile, q_stage, kv_count, q_buffer, kv_head, v_scale)

    @property
    def q_rows(self):
        """The queries of the warpgroup's matrix rows, 16-bit [64, H] SMEM in rows."""
        return self.cta.smem.q_tma.at[self.q_buffer, pl.ds(0, WGMMA_M)]


def specialize(condition, when_true: bool, when_false: bool, run: Callable[[bool], Any]) -> Any:
    """``run(value)`` with the static value of ``condition`` (bool scalar).

    when_true, when_false: static, whether the condition can be true and whether it can be false.
    If both, the code is there twice and a branch selects.
    """
    if when_true != when_false:
        return run(when_true)
    return lax.cond(condition, lambda: run(True), lambda: run(False))
