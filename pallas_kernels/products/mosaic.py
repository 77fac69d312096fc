"""Products of 8 or 16 rows on Hopper (Mosaic GPU): weights streamed once, the rest as they end.

A program takes a tile of columns over the whole depth. One warpgroup copies chunks of weights and
of rows (TMA) through a ring in shared memory, another multiplies them (wgmma) and ends with the
residual, the norm or the activation in registers, so that nothing but results is written. Bytes
moved: the weights once from memory; the rows once a program, from the cache.

The tensor cores take 64 rows. Slots hold only those there are, and instructions read on into the
slots that follow: rows of a product do not mix, and those results are dropped.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.products.rows import read_tile, write_column, write_tile
from pallas_kernels.products.stream import launch, multiply
from pallas_kernels.products.tiling import ROWS, Tiling, choose_tiling, refusal

_H200_MULTIPROCESSORS = 132  # used when lowering without a GPU


def supported(T: int, depth: int, columns: int) -> bool:
    """Whether each kernel here multiplies bfloat16 [T, depth] with [depth, columns]."""
    return refusal(T, depth, columns, whole=True) is None


def product(
    h: Float[Array, "T D"],
    w: Float[Array, "D E"],
    squares: Float32[Array, "T P"] | None = None,
    eps: float = 0.0,
    *,
    weights_ready: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "T E"]:
    """h @ w, rows divided by their root mean square; same contract as xla.

    Args:
        h, w: bfloat16; T is 8 or 16, D a multiple of 64, E of 8.
        squares: partial sums of squares as ``add_product`` gives them.
        eps: added to their mean.
        weights_ready: no kernel of this program writes w, so it is fetched while the kernel before
            still runs.
        tiling: None for the one that suits the shapes.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    (D, E), T = w.shape, h.shape[0]
    tiling = _tiling(tiling, T, D, E, h=h, w=w)

    def product(h, w, *rest, **scratch):
        """GMEM: h [T, D], w [D, E], squares [T, P] if given, out [T, E]."""
        *partial, out = rest

        def after(start, scale, total):
            write_tile(out, (total * scale).astype(out.dtype), start)

        multiply(
            h,
            lambda part, depth, own: w.at[depth, own],
            weights_ready=weights_ready,
            before=lambda start: _row_scale(partial, eps, D, tiling.columns),
            after=after,
            **scratch,
        )

    arrays = (h, w) if squares is None else (h, w, squares)
    shape = jax.ShapeDtypeStruct((T, E), h.dtype)
    return launch(product, arrays, out_type=shape, rows=T, columns=E, parts=1, tiling=tiling)


def gated_product(
    h: Float[Array, "T D"],
    w: Float[Array, "D 2 F"],
    squares: Float32[Array, "T P"] | None = None,
    eps: float = 0.0,
    *,
    weights_ready: bool = False,
    tiling: Tiling | None = None,
) -> Float[Array, "T F"]:
    """silu(gate) * up of the products with w[:, 0] and w[:, 1]; otherwise as ``product``.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    (D, _, F), T = w.shape, h.shape[0]
    tiling = _tiling(tiling, T, D, F, parts=2, h=h, w=w)

    def gated_product(h, w, *rest, **scratch):
        """GMEM: h [T, D], w [D, 2, F], squares [T, P] if given, out [T, F]."""
        *partial, out = rest

        def after(start, scale, gate, up):
            gate, up = gate * scale, up * scale
            write_tile(out, (gate / (1.0 + jnp.exp(-gate)) * up).astype(out.dtype), start)

        multiply(
            h,
            lambda part, depth, own: w.at[depth, part, own],
            weights_ready=weights_ready,
            before=lambda start: _row_scale(partial, eps, D, tiling.columns),
            after=after,
            **scratch,
        )

    arrays = (h, w) if squares is None else (h, w, squares)
    shape = jax.ShapeDtypeStruct((T, F), h.dtype)
    return launch(gated_product, arrays, out_type=shape, rows=T, columns=F, parts=2, tiling=tiling)


def add_product(
    x: Float[Array, "T D"],
    h: Float[Array, "T F"],
    w: Float[Array, "F D"],
    norm_weight: Float[Array, " D"],
    *,
    weights_ready: bool = False,
    tiling: Tiling | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], Float32[Array, "T P"]]:
    """(x + h @ w, that times the norm's weight, partial sums of its squares); same contract as xla.

    Args:
        x, h, w, norm_weight: bfloat16; T is 8 or 16, F a multiple of 64, D of 16.
        weights_ready, tiling: as in ``product``; the columns of the tiling divide D.

    P is the number of programs; the sums do not depend on the order they end in.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    (F, D), T = w.shape, h.shape[0]
    tiling = _tiling(tiling, T, F, D, whole=True, x=x, h=h, w=w, norm_weight=norm_weight)
    n = tiling.columns

    def add_product(x, h, w, norm_weight, total_ref, scaled_ref, squares_ref, **scratch):
        """GMEM: x [T, D], h [T, F], w [F, D], norm_weight [D], total, scaled [T, D], squares
        [T, P]."""

        def after(start, loaded, update):
            before, weight = loaded
            total = (before + update).astype(x.dtype)
            write_tile(total_ref, total, start)
            y = total.astype(jnp.float32)
            write_tile(scaled_ref, (y * weight).astype(x.dtype), start)
            write_column(squares_ref, jnp.sum(y * y, axis=1), lax.axis_index("program"))

        multiply(
            h,
            lambda part, depth, own: w.at[depth, own],
            weights_ready=weights_ready,
            before=lambda start: (read_tile(x, start, n), read_tile(norm_weight, start, n)),
            after=after,
            **scratch,
        )

    rows = jax.ShapeDtypeStruct((T, D), x.dtype)
    squares = jax.ShapeDtypeStruct((T, D // n), jnp.float32)
    return launch(
        add_product,
        (x, h, w, norm_weight),
        out_type=(rows, rows, squares),
        rows=T,
        columns=D,
        parts=1,
        tiling=tiling,
    )


def multiprocessors() -> int:
    """Of this process's GPU."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _H200_MULTIPROCESSORS


def _row_scale(partial, eps: float, D: int, columns: int):
    """What rows are multiplied with, [64, columns]; the scalar 1 without partial sums."""
    if not partial:
        return jnp.float32(1.0)
    [squares] = partial
    # Read in the layout of a product's tile, whose rows add up within four threads.
    tile = read_tile(squares, jnp.int32(0), -(-squares.shape[1] // 8) * 8)
    scale = lax.rsqrt(tile.sum(axis=1) * (1.0 / D) + eps)
    return lax.broadcast_in_dim(scale, (ROWS, columns), [0])


def _tiling(
    tiling: Tiling | None,
    T: int,
    depth: int,
    columns: int,
    *,
    parts: int = 1,
    whole: bool = False,
    **arrays: jax.Array,
) -> Tiling:
    """Check what is multiplied; the tiling given or chosen."""
    wrong = ", ".join(f"{name} {a.dtype}" for name, a in arrays.items() if a.dtype != jnp.bfloat16)
    if wrong:
        raise ValueError(f"{wrong}: the kernels take bfloat16")
    why = refusal(T, depth, columns, whole=whole)
    if why is not None:
        raise ValueError(why)
    if tiling is None:
        return choose_tiling(
            T, depth, columns, parts=parts, whole=whole, multiprocessors=multiprocessors()
        )
    if depth % tiling.chunk or (whole and columns % tiling.columns):
        raise ValueError(f"{tiling} does not divide {columns} columns of a depth of {depth}")
    chunks = depth // tiling.chunk
    if not min(2, chunks) <= tiling.ring <= chunks:
        raise ValueError(
            f"a ring of {tiling.ring} slots for {chunks} chunks; 2 to {chunks} will do"
        )
    return tiling
