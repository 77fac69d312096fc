"""The gated product of 8 to 64 rows on Hopper (Mosaic GPU): weights streamed once.

A program takes a tile of columns of gate and of up over the whole depth. One warpgroup copies
chunks of both and of the rows (TMA) through a ring in shared memory, another multiplies them
(wgmma), and the activation ends in registers. Bytes moved: the weights once from memory; the rows
once a program, from the cache; the results.

The tensor cores take 64 rows. Slots hold only those there are, and instructions read on into the
slots that follow: rows of a product do not mix, and those results are dropped.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gated_product.stores import store_columns
from pallas_kernels.gated_product.tiling import ROWS, Tiling, choose_tiling, misfit, refusal

# pyright: reportAbstractUsage=false
_ACC = plgpu.WGMMAAccumulatorRef
_H200_MULTIPROCESSORS = 132  # used when lowering without a GPU


def supported(T: int, D: int, F: int) -> bool:
    """Whether the kernel multiplies bfloat16 [T, D] with [D, 2, F] and is expected to win.

    That takes programs of at least 64 columns that run all at once on at least 80 % of the
    multiprocessors.
    """
    return refusal(T, D, F) is None and choose_tiling(T, D, F, multiprocessors()) is not None


def gated_product(
    h: Float[Array, "T D"], w: Float[Array, "D 2 F"], *, tiling: Tiling | None = None
) -> Float[Array, "T F"]:
    """silu(h @ w[:, 0]) * (h @ w[:, 1]) in bfloat16 (SwiGLU; Shazeer, 2020).

    Sums and the activation are float32 and only the result is rounded; ``xla`` rounds the products
    too, so the two differ in the last bits.

    Args:
        h, w: bfloat16; T is 8, 16, 32 or 64, D and F are multiples of 64.
        tiling: None for the one that suits the shapes.

    Raises:
        ValueError: a shape, dtype or tiling the kernel does not take, or no tiling given for shapes
            that are not ``supported``.
    """
    (D, _, F), T = w.shape, h.shape[0]
    tiling = _checked(tiling, h, w)
    n, chunk, ring = tiling.columns, tiling.chunk, tiling.ring
    tiled = (
        plgpu.TilingTransform((8, tiling.swizzle // 2)),
        plgpu.SwizzleTransform(tiling.swizzle),
    )

    def gated_product_kernel(h_ref, w_ref, out_ref, *, tiles, lines, full, free):
        """GMEM: h [T, D], w [D, 2, F], out [T, F]. SMEM: tiles [ring, 2, chunk, n], lines
        [(ring - 1) * T + 64, chunk]. Barriers full and free, one a slot."""
        start = pl.multiple_of(lax.axis_index("program") * n, n)
        wg = lax.axis_index("wg")
        plgpu.griddepcontrol_launch_dependents()

        @pl.when(wg == 1)
        def _producer():
            def load(i, slot):
                depth = pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
                for part in range(2):
                    source = w_ref.at[depth, part, pl.ds(start, n)]
                    plgpu.copy_gmem_to_smem(source, tiles.at[slot, part], full.at[slot])
                own = pl.ds(pl.multiple_of(slot * T, T), T)
                plgpu.copy_gmem_to_smem(h_ref.at[:, depth], lines.at[own], full.at[slot])

            def refill(i, _):
                slot = lax.rem(i, jnp.int32(ring))
                plgpu.barrier_wait(free.at[slot])
                load(i, slot)

            plgpu.griddepcontrol_wait()  # the consumer sees nothing before these copies
            lax.fori_loop(0, ring, lambda i, _: load(i, i), None)
            lax.fori_loop(ring, D // chunk, refill, None)

        @pl.when(wg == 0)
        def _consumer():
            def accumulate(*totals):
                def step(i, _):
                    slot = lax.rem(i, jnp.int32(ring))
                    plgpu.barrier_wait(full.at[slot])
                    own = pl.ds(pl.multiple_of(slot * T, T), ROWS)
                    for part, total in enumerate(totals):
                        plgpu.wgmma(total, lines.at[own], tiles.at[slot, part])
                    plgpu.wgmma_wait(2)  # those of the slot before are done
                    last = lax.rem(i + ring - 1, jnp.int32(ring))
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[last]))

                lax.fori_loop(0, D // chunk, step, None)
                plgpu.wgmma_wait(0)
                return tuple(total[...] for total in totals)

            gate, up = pl.run_scoped(accumulate, *[_ACC((ROWS, n), jnp.float32)] * 2)
            hidden = gate / (1.0 + jnp.exp(-gate)) * up
            store_columns(out_ref, hidden.astype(h.dtype), start)

    return plgpu.kernel(
        gated_product_kernel,
        out_type=jax.ShapeDtypeStruct((T, F), h.dtype),
        scratch_types=dict(
            tiles=plgpu.SMEM((ring, 2, chunk, n), jnp.bfloat16, transforms=tiled),
            # Those of all slots, and as many again as an instruction reads beyond the last.
            lines=plgpu.SMEM(((ring - 1) * T + ROWS, chunk), jnp.bfloat16, transforms=tiled),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=3),
            free=plgpu.Barrier(num_barriers=ring),
        ),
        grid=(-(-F // n),),
        grid_names=("program",),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(h, w)


def multiprocessors() -> int:
    """Of this process's GPU."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def _checked(tiling: Tiling | None, h: jax.Array, w: jax.Array) -> Tiling:
    """The tiling given or chosen."""
    (D, _, F), T = w.shape, h.shape[0]
    for name, array in (("h", h), ("w", w)):
        if array.dtype != jnp.bfloat16:
            raise ValueError(f"{name} is {array.dtype}; the kernel takes bfloat16")
    why = refusal(T, D, F)
    if why is not None:
        raise ValueError(why)
    if tiling is None:
        tiling = choose_tiling(T, D, F, multiprocessors())
    if tiling is None:
        raise ValueError(
            f"{F} columns do not fill the {multiprocessors()} multiprocessors at once; "
            "use the plain form, or give a tiling"
        )
    why = misfit(tiling, T, D)
    if why is not None:
        raise ValueError(why)
    return tiling
