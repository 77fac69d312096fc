"""The attention kernel for Hopper in Pallas Mosaic GPU: FlashAttention over paged KV by work list.

Persistent CTAs of three warpgroups: a producer that loads by TMA (``producer``) and two consumers
that compute with wgmma (``consumer``). A CTA takes work tiles from a static schedule
(``tile_scheduler``). A work tile is an item of a work list on one KV head or on two
(``work_tile``). The producer streams K and V through a pipeline in shared memory (``pipeline``) and
runs ahead over the ends of work tiles; scores, softmax and output stay in registers. Bytes from
GMEM: K and V of each item once, 2 * tokens * K * H * itemsize, and its queries once. Bytes to GMEM:
the results of its live rows once. Reads of KV are marked evict-first in L2, except those of
cooperative work tiles in steps of many rows, where many work tiles read the same KV.
Method: FlashAttention-3 (Shah et al., 2024), with swap-AB for decode.
"""

from collections.abc import Callable

from jax import lax
from jax.experimental import pallas as pl

from rjax.pallas_kernels.attention.mosaic.config import CONSUMERS, KernelConfig
from rjax.pallas_kernels.attention.mosaic.consumer import run_consumer
from rjax.pallas_kernels.attention.mosaic.cta import Cta, GlobalMemory, KernelShape, SharedMemory
from rjax.pallas_kernels.attention.mosaic.producer import run_producer
from rjax.pallas_kernels.attention.mosaic.tile_scheduler import TileScheduler
from rjax.pallas_kernels.mosaic_emit import begin_kernel

CTA_AXIS, WARPGROUP_AXIS = "cta", "wg"
"""Names of the grid axis and of the axis of warpgroups."""


def make_kernel(cfg: KernelConfig, shape: KernelShape, options: tuple[str, ...]) -> Callable:
    """The kernel body for ``plgpu.kernel``; options: names of the optional operands there are.

    Its Refs are those of ``GlobalMemory.bind`` by position and of ``SharedMemory`` by name.
    """

    def attention_kernel(*operands_and_results, **scratch) -> None:
        gmem = GlobalMemory.bind(operands_and_results, options)
        smem = SharedMemory(**scratch)
        begin_kernel()
        pipeline = smem.pipeline(cfg)
        wg = lax.axis_index(WARPGROUP_AXIS)
        can_reverse = shape.has_cooperative and shape.has_head_pairs
        scheduler = TileScheduler.of(
            lax.axis_index(CTA_AXIS), cfg.num_ctas, gmem.schedule, can_reverse
        )
        cta = Cta(cfg, shape, gmem, smem, pipeline, scheduler, wg)
        pl.when(wg == CONSUMERS)(lambda: run_producer(cta))
        pl.when(wg < CONSUMERS)(lambda: run_consumer(cta))

    return attention_kernel
