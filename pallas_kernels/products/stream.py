"""The loop that the products share: weights through a ring in shared memory, into tensor cores."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.products.tiling import ROWS, Tiling

# pyright: reportAbstractUsage=false
_ACC = plgpu.WGMMAAccumulatorRef


def launch(
    body: Callable[..., None],
    arrays: Sequence[jax.Array],
    *,
    out_type: Any,
    rows: int,
    columns: int,
    parts: int,
    tiling: Tiling,
):
    """Run ``body(*GMEM inputs, *outputs, **scratch)``, a program for each tile of columns.

    The scratch is what ``multiply`` takes. parts: weight matrices of so many columns each.
    """
    n, chunk, ring = tiling.columns, tiling.chunk, tiling.ring
    tiled = (
        plgpu.TilingTransform((8, tiling.swizzle // 2)),
        plgpu.SwizzleTransform(tiling.swizzle),
    )
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=dict(
            tiles=plgpu.SMEM((ring, parts, chunk, n), jnp.bfloat16, transforms=tiled),
            # Those of all slots, and as many again as an instruction reads beyond the last.
            lines=plgpu.SMEM(((ring - 1) * rows + ROWS, chunk), jnp.bfloat16, transforms=tiled),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=parts + 1),
            free=plgpu.Barrier(num_barriers=ring),
        ),
        grid=(-(-columns // n),),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*arrays)


def multiply(
    h,
    weights: Callable[[int, Any, Any], Any],
    *,
    tiles,
    lines,
    full,
    free,
    weights_ready: bool,
    before: Callable[[Any], Any],
    after: Callable[..., None],
) -> None:
    """Multiply this program's columns of every part, and finish them.

    Args:
        h: [T, D] in GMEM.
        weights: (part, depth slice, column slice) to the weights' [chunk, n] in GMEM.
        tiles: SMEM [ring, parts, chunk, n]; lines: SMEM [(ring - 1) * T + 64, chunk].
        full, free: barriers, one a slot.
        weights_ready: fetch weights before the kernel before has ended.
        before: (first column) to what the end needs, read while the first weights are under way.
        after: (first column, what was read, float32 [64, n] of each part); writes the result.
    """
    T, D = h.shape
    ring, parts, chunk, n = tiles.shape
    count = D // chunk
    start = pl.multiple_of(lax.axis_index("program") * n, n)
    wg = lax.axis_index("wg")
    plgpu.griddepcontrol_launch_dependents()

    def load_weights(i, slot):
        depth = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        for part in range(parts):
            source = weights(part, depth, pl.ds(start, n))
            plgpu.copy_gmem_to_smem(source, tiles.at[slot, part], full.at[slot])

    def load_rows(i, slot):
        depth = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        own = pl.ds(pl.multiple_of(slot * T, T), T)
        plgpu.copy_gmem_to_smem(h.at[:, depth], lines.at[own], full.at[slot])

    @pl.when(wg == 1)
    def _producer():
        if not weights_ready:
            plgpu.griddepcontrol_wait()
        lax.fori_loop(0, ring, lambda i, _: load_weights(i, i), None)
        if weights_ready:
            plgpu.griddepcontrol_wait()
        lax.fori_loop(0, ring, lambda i, _: load_rows(i, i), None)

        def step(i, _):
            slot = lax.rem(i, jnp.int32(ring))
            plgpu.barrier_wait(free.at[slot])
            load_weights(i, slot)
            load_rows(i, slot)

        lax.fori_loop(ring, count, step, None)

    @pl.when(wg == 0)
    def _consumer():
        plgpu.griddepcontrol_wait()
        loaded = before(start)

        def accumulate(*totals):
            def step(i, _):
                slot = lax.rem(i, jnp.int32(ring))
                plgpu.barrier_wait(full.at[slot])
                own = pl.ds(pl.multiple_of(slot * T, T), ROWS)
                for part, total in enumerate(totals):
                    plgpu.wgmma(total, lines.at[own], tiles.at[slot, part])
                plgpu.wgmma_wait(parts)  # those of the slot before are done
                last = lax.rem(i + ring - 1, jnp.int32(ring))
                pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[last]))

            lax.fori_loop(0, count, step, None)
            plgpu.wgmma_wait(0)
            return tuple(total[...] for total in totals)

        totals = pl.run_scoped(accumulate, *(_ACC((ROWS, n), jnp.float32) for _ in range(parts)))
        after(start, loaded, *totals)
