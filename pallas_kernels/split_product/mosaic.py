"""Products of few rows on Hopper (Mosaic GPU): weights streamed once, the depth cut in parts.

A program takes a tile of columns over a run of the depth. One warpgroup copies chunks of weights
and of rows (TMA) through a ring in shared memory, another multiplies them (wgmma) and writes its
part in float32. So all multiprocessors stream, though the columns alone make too few tiles, and
nobody waits for a kernel that sums: whoever reads the product next sums it (``residual_norm``,
``kv_write``). Bytes moved: the weights once from memory; the rows once for each tile of columns,
from the cache; X * T * E * 4 of parts.

The tensor cores take 64 rows. Slots hold only those there are, and instructions read on into the
slots that follow: rows of a product do not mix, and those results are dropped.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float, Float32

from pallas_kernels.mosaic_emit import SCALAR, multiprocessors

_ACC = plgpu.WGMMAAccumulatorRef
ROWS = (8, 16, 32, 64)
"""Rows that the kernel takes."""

_TILE = 64  # rows of an instruction
_MOST_SPLITS = 8
_SHARED_BYTES = 200 << 10  # for the ring
_SLOTS = 8


def split_product(
    h: Float[Array, "T D"], w: Float[Array, "D E"], *, splits: int | None = None
) -> Float32[Array, "X T E"]:
    """Parts, float32, that sum to h @ w; the same ones whatever the run.

    Args:
        h, w: bfloat16 or float16, both alike; T is 8, 16, 32 or 64, D and E multiples of 64.
        splits: X; None for as many as fill the multiprocessors, at most 8.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    (T, D), E = h.shape, w.shape[1]
    if h.dtype.itemsize != 2 or h.dtype != w.dtype:
        raise ValueError(f"h is {h.dtype} and w {w.dtype}; the kernel takes one 16-bit dtype")
    why = refusal(T, D, E)
    if why is not None:
        raise ValueError(why)
    cut = _choose_cut(T, D, E, splits)
    n, chunk, ring = cut.columns, cut.chunk, cut.ring
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def split_product(h, w, out, *, tiles, lines, full, free):
        """GMEM: h [T, D], w [D, E], out [X, T, E]. SMEM: tiles [ring, chunk, n], lines
        [(ring - 1) * T + 64, chunk]. Barriers, one a slot: full, free."""
        column = pl.multiple_of(lax.axis_index("column") * n, n)
        part = lax.axis_index("part")
        chunks = jnp.int32(D // chunk)
        start = lax.div(part * chunks, jnp.int32(cut.splits))
        count = lax.div((part + 1) * chunks, jnp.int32(cut.splits)) - start
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _producer():
            def load(i, _):
                slot = lax.rem(i, jnp.int32(ring))
                plgpu.barrier_wait(free.at[slot])
                depth = pl.ds(pl.multiple_of((start + i) * chunk, chunk), chunk)
                own = pl.ds(pl.multiple_of(slot * T, T), T)
                source = w.at[depth, pl.ds(column, n)]
                plgpu.copy_gmem_to_smem(source, tiles.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(h.at[:, depth], lines.at[own], full.at[slot])

            lax.fori_loop(0, count, load, None)

        @pl.when(wg == 0)
        def _consumer():
            for slot in range(ring):
                plgpu.barrier_arrive(free.at[slot])

            def accumulate(total):
                def step(i, _):
                    slot = lax.rem(i, jnp.int32(ring))
                    plgpu.barrier_wait(full.at[slot])
                    own = pl.ds(pl.multiple_of(slot * T, T), _TILE)
                    plgpu.wgmma(total, lines.at[own], tiles.at[slot])
                    plgpu.wgmma_wait(1)  # that of the slot before is done
                    last = lax.rem(i + ring - 1, jnp.int32(ring))
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[last]))

                lax.fori_loop(0, count, step, None)
                plgpu.wgmma_wait(0)
                return total[...]

            total = pl.run_scoped(accumulate, _ACC((_TILE, n), jnp.float32))
            _write(out, total, part, column)

    return plgpu.kernel(
        split_product,
        out_type=jax.ShapeDtypeStruct((cut.splits, T, E), jnp.float32),
        scratch_types=dict(
            tiles=plgpu.SMEM((ring, chunk, n), h.dtype, transforms=swizzled),
            lines=plgpu.SMEM(((ring - 1) * T + _TILE, chunk), h.dtype, transforms=swizzled),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=2),
            free=plgpu.Barrier(num_barriers=ring),
        ),
        grid=(E // n, cut.splits),
        grid_names=("column", "part"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(h, w)


def refusal(T: int, depth: int, columns: int) -> str | None:
    """Why the kernel cannot multiply [T, depth] with [depth, columns], or None."""
    if T not in ROWS:
        return f"{T} rows; the kernel takes {', '.join(map(str, ROWS))}, so pad them"
    if depth % 64 or columns % 64:
        return f"weights of {depth} x {columns}; the kernel takes multiples of 64"
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """columns: of a program; chunk: depth of a slot; splits: of the depth; ring: slots."""

    columns: int
    chunk: int
    splits: int
    ring: int


def _choose_cut(T: int, depth: int, columns: int, splits: int | None) -> _Cut:
    """The cut into the most programs that run at once, with wide tiles if equal."""
    cuts = []
    for n in (128, 64):
        if columns % n:
            continue
        tiles = columns // n
        chunk = 64 if n == 128 or depth % 128 else 128
        most = min(_MOST_SPLITS, depth // chunk)
        own = splits or max(1, min(most, multiprocessors() // tiles))
        slot = (n + T) * chunk * 2
        ring = max(2, min(_SLOTS, _SHARED_BYTES // slot, -(-depth // chunk // own)))
        cuts.append(_Cut(n, chunk, own, ring))
    return max(cuts, key=lambda cut: columns // cut.columns * cut.splits)


def _write(out, value, part, column):
    """``out[part, row, column + c] = value[row, c]`` for the rows there are.

    out: float32 [X, T, E] in GMEM; value: [64, n] in WGMMA layout.
    """
    T = out.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def write(_, out_, value_, part_, column_):
        index = ir.IndexType.get()
        [which], [first] = part_.registers.flat, column_.registers.flat
        which, first = arith.index_cast(index, which), arith.index_cast(index, first)
        places = value_.layout.thread_idxs(value_.shape)
        for (row, at), register in zip(places, value_.registers.flat, strict=True):
            pair = ir.VectorType.get((2,), ir.F32Type.get())
            assert register.type == pair, register.type
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(T, index))):
                place = [which, row, arith.addi(first, at)]
                vector.store(register, out_, place, alignment=8)

    write(out, value, part, column)
