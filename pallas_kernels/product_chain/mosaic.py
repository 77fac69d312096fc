"""A layer's products between two attentions, in one launch (Hopper, Mosaic GPU).

One program a multiprocessor. In each, one warpgroup streams weights into a ring in shared memory,
one copies the rows they are multiplied with, the others multiply. The products depend on each
other, so the programs wait for all after each product and again after its pieces have been added;
but the weights depend on nothing: their stream runs on through every wait, until the ring is full,
and memory hardly ever rests. Between kernels it would rest for the end of one and the start of the
next. Bytes moved: the weights once; rows and pieces, a tenth of that, stay in the L2 cache.

Sums are in float32 and in a fixed order, whatever the number of rows.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic_emit import THREADS
from pallas_kernels.product_chain.grid_sync import GridSync
from pallas_kernels.product_chain.pieces import strided, sum_over_threads, sum_pieces
from pallas_kernels.product_chain.split import TILE_K, TILE_N, ProductSplit

MOST_ROWS = 128
"""With more rows products are bound by arithmetic, and another kernel is faster."""

BARRIERS = 8
"""Counters of one launch."""

_SMEM_BYTES = 226 << 10
_ROW_SLOTS = 4
_HALF = 64  # rows of one multiplying warpgroup
_WIDEST = 4096  # numbers that a warpgroup adds at once
_UNIT = 512


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a chain, all of one 16-bit dtype but the norms, which may be of any.

    Attributes:
        output: [N * H, D], of the attention's output.
        mlp_norm: [D].
        up: [D, 2 * F], gates first.
        down: [F, D].
        next_norm: [D], of the next layer, or the last norm.
        qkv: [D, Z] of the next layer, or None after the last.
    """

    output: Float[Array, "C D"]
    mlp_norm: Float[Array, " D"]
    up: Float[Array, "D E"]
    down: Float[Array, "F D"]
    next_norm: Float[Array, " D"]
    qkv: Float[Array, "D Z"] | None


def why_not(T: int, sizes: tuple[int, ...]) -> str | None:
    """Why the chain cannot take T rows or products of these sizes, or None."""
    if T > MOST_ROWS or T % 8 or (T > _HALF and T != MOST_ROWS):
        return f"{T} rows; it takes multiples of 8 up to {_HALF}, and {MOST_ROWS}"
    for size in sizes:
        if size % TILE_N or size < _UNIT:
            return f"a product of size {size}; it takes multiples of {TILE_N} from {_UNIT} on"
    return None


def product_chain(
    attended: Float[Array, "T C"],
    x: Float[Array, "T D"],
    weights: LayerWeights,
    eps: float,
    counters: Any,
    launch: Int[Array, " 1"],
    *,
    programs: int,
) -> tuple[Float[Array, "T D"], Float[Array, "T Z"]]:
    """Everything of a decoder layer after its attention, and the next layer's projections.

        x += attended @ output;  h = up of rms_norm(x);  x += (silu(gate) * up) @ down
        result: rms_norm(x) @ qkv, or rms_norm(x) where qkv is None

    Args:
        attended, x: of the weights' dtype, bfloat16 or float16.
        weights: see there.
        eps: of both norms.
        counters: a ref (``jax.new_ref``) of int32 zeros [X, BARRIERS], X launches.
        launch: int32, which of the launches this is; its counters are used up.
        programs: the GPU's multiprocessors; all must be able to run at once.

    Returns:
        (x, result), both [T, ...] in the dtype of x. Sums are rounded once, where they are stored.

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    T, D = x.shape
    C, F = attended.shape[1], weights.down.shape[0]
    Z = D if weights.qkv is None else weights.qkv.shape[1]
    if reason := why_not(T, (C, D, F, Z)):
        raise ValueError(f"the product chain was given {reason}")
    dtype = x.dtype
    matrices = [weights.output, weights.up, weights.down]
    if weights.qkv is not None:
        matrices.append(weights.qkv)
    if dtype not in (jnp.bfloat16, jnp.float16) or any(
        a.dtype != dtype for a in (attended, *matrices)
    ):
        found = ", ".join(str(a.dtype) for a in (x, attended, *matrices))
        raise ValueError(f"dtypes {found}; the product chain takes one of bfloat16 and float16")
    splits = tuple(ProductSplit(*matrix.shape, programs) for matrix in matrices)
    halves = -(-T // _HALF)
    row_bytes = 2 * halves * _HALF * TILE_K
    tile_bytes = 2 * TILE_K * TILE_N
    ring = (_SMEM_BYTES - _ROW_SLOTS * row_bytes) // tile_bytes
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    pieces = max(split.pieces for split in splits)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    out_type = (
        shape((T, D)),
        shape((T, Z)),
        shape((T, D)),
        shape((T, F)),
        jax.ShapeDtypeStruct((pieces, halves * _HALF, TILE_N), jnp.float32),
    )
    x, result, *_ = plgpu.kernel(
        _make_body(splits, T, D, F, Z, eps, programs, halves, ring),
        out_type=out_type,
        scratch_types=dict(
            tiles=plgpu.SMEM((ring, TILE_K, TILE_N), dtype, transforms=swizzled),
            rows=plgpu.SMEM((_ROW_SLOTS, halves * _HALF, TILE_K), dtype, transforms=swizzled),
            sums=plgpu.SMEM((halves, THREADS // 32), jnp.float32),
            tile_full=plgpu.Barrier(num_barriers=ring),
            tile_free=plgpu.Barrier(num_barriers=ring, num_arrivals=halves),
            rows_full=plgpu.Barrier(num_barriers=_ROW_SLOTS),
            rows_free=plgpu.Barrier(num_barriers=_ROW_SLOTS, num_arrivals=halves),
        ),
        grid=(programs,),
        grid_names=("program",),
        num_threads=halves + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(
        attended,
        x,
        launch,
        weights.mlp_norm,
        weights.next_norm,
        *matrices,
        counters,
    )
    return x, result


def _make_body(
    splits: tuple[ProductSplit, ...],
    T: int,
    D: int,
    F: int,
    Z: int,
    eps: float,
    programs: int,
    halves: int,
    ring: int,
):
    def body(
        attended,
        x,
        launch,
        mlp_norm,
        next_norm,
        *rest,
        tiles,
        rows,
        sums,
        tile_full,
        tile_free,
        rows_full,
        rows_free,
    ):
        """GMEM: attended [T, C], x [T, D], launch int32 [1], norms [D]; rest: the matrices,
        counters int32 [X, BARRIERS], total [T, D], result [T, Z], normed [T, D], hidden [T, F],
        pieces float32 [X, R, TILE_N]. SMEM: tiles [ring, TILE_K, TILE_N], rows
        [_ROW_SLOTS, R, TILE_K], sums float32 [R / 64, 4]. Barriers: all others.
        """
        matrices = rest[: len(splits)]
        counters, total, result, normed, hidden, pieces = rest[len(splits) :]
        inputs = (attended, normed, hidden, normed)
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        sync = GridSync(counters, launch[0], programs * halves)

        def slot_of(number, slots: int):
            return lax.rem(number, jnp.int32(slots))

        @pl.when(wg == halves)
        def _stream_weights():
            used = jnp.int32(0)
            for split, matrix in zip(splits, matrices, strict=True):
                start, stop = split.run(program)

                def step(tile, used, split=split, matrix=matrix):
                    slot = slot_of(used, ring)
                    column = lax.div(tile, jnp.int32(split.depth))
                    line = (tile - column * split.depth) * TILE_K
                    plgpu.barrier_wait(tile_free.at[slot])
                    place = (
                        pl.ds(pl.multiple_of(line, TILE_K), TILE_K),
                        pl.ds(pl.multiple_of(column * TILE_N, TILE_N), TILE_N),
                    )
                    plgpu.copy_gmem_to_smem(matrix.at[place], tiles.at[slot], tile_full.at[slot])
                    return used + 1

                used = lax.fori_loop(start, stop, step, used)

        @pl.when(wg == halves + 1)
        def _stream_rows():
            used = jnp.int32(0)
            for number, (split, source) in enumerate(zip(splits, inputs)):
                start, stop = split.run(program)
                if number:
                    sync.wait(2 * number - 1)

                def step(tile, used, split=split, source=source):
                    slot = slot_of(used, _ROW_SLOTS)
                    column = lax.rem(tile, jnp.int32(split.depth)) * TILE_K
                    plgpu.barrier_wait(rows_free.at[slot])
                    place = source.at[:, pl.ds(pl.multiple_of(column, TILE_K), TILE_K)]
                    plgpu.copy_gmem_to_smem(
                        place, rows.at[slot, pl.ds(0, T)], rows_full.at[slot]
                    )
                    return used + 1

                used = lax.fori_loop(start, stop, step, used)

        @pl.when(wg < halves)
        def _multiply():
            for slot in range(ring):
                plgpu.barrier_arrive(tile_free.at[slot])
            for slot in range(_ROW_SLOTS):
                plgpu.barrier_arrive(rows_free.at[slot])

            def release(used):
                plgpu.barrier_arrive(tile_free.at[slot_of(used, ring)])
                plgpu.barrier_arrive(rows_free.at[slot_of(used, _ROW_SLOTS)])

            def multiply(split: ProductSplit, used):
                start, stop = split.run(program)
                own = pl.ds(wg * _HALF, _HALF)

                def column(number, used):
                    first = jnp.maximum(number * split.depth, start)
                    count = jnp.minimum((number + 1) * split.depth, stop) - first

                    def accumulate(acc):
                        def step(i, _):
                            tile, row = slot_of(used + i, ring), slot_of(used + i, _ROW_SLOTS)
                            plgpu.barrier_wait(tile_full.at[tile])
                            plgpu.barrier_wait(rows_full.at[row])
                            plgpu.wgmma(acc, rows.at[row, own], tiles.at[tile])
                            plgpu.wgmma_wait(1)  # the product before has read its slots
                            pl.when(i > 0)(lambda: release(used + i - 1))

                        lax.fori_loop(0, count, step, None)
                        plgpu.wgmma_wait(0)
                        release(used + count - 1)
                        return acc[...]

                    kind = plgpu.ACC((_HALF, TILE_N), jnp.float32)
                    pieces[program + number, own] = pl.run_scoped(accumulate, kind)
                    return used + count

                low = lax.div(start, jnp.int32(split.depth))
                high = lax.div(stop + split.depth - 1, jnp.int32(split.depth))
                return lax.fori_loop(low, jnp.where(start < stop, high, low), column, used)

            worker = program + programs * wg
            workers = programs * halves

            def each(count: int, run):
                mine = lax.div(count - worker + (workers - 1), jnp.int32(workers))
                lax.fori_loop(0, mine, lambda i, _: run(worker + i * workers), None)

            def norm(split: ProductSplit, source, scale, target):
                """total = source + product; target = its norm."""
                layout = strided(D)

                def run(row):
                    def read(ref):
                        return plgpu.load(ref, layout=layout).astype(jnp.float32)

                    update = sum_pieces(pieces, split, row, jnp.int32(0), D)
                    value = (read(source.at[row]) + update).astype(x.dtype)
                    total[row] = value
                    y = value.astype(jnp.float32)
                    mean = sum_over_threads(y * y, D, sums.at[wg]) * (1.0 / D)
                    target[row] = (y * lax.rsqrt(mean + eps) * read(scale)).astype(x.dtype)

                each(T, run)

            def by_chunk(width: int, run):
                """``run(row, first column, columns)`` until all columns of all rows are done."""
                chunks = max(-(-width // _WIDEST), workers // T, 1)
                size = -(-width // (chunks * _UNIT)) * _UNIT
                chunks = -(-width // size)

                def unit(number):
                    row = lax.div(number, jnp.int32(chunks))
                    first = jnp.minimum((number - row * chunks) * size, width - size)
                    run(row, pl.multiple_of(first, 4), size)

                each(T * chunks, unit)

            def activate(split: ProductSplit):
                def run(row, first, size: int):
                    gate = sum_pieces(pieces, split, row, first, size)
                    up = sum_pieces(pieces, split, row, first + F, size)
                    value = gate / (1.0 + jnp.exp(-gate)) * up
                    hidden[row, pl.ds(first, size)] = value.astype(x.dtype)

                by_chunk(F, run)

            def project(split: ProductSplit):
                def run(row, first, size: int):
                    value = sum_pieces(pieces, split, row, first, size)
                    result[row, pl.ds(first, size)] = value.astype(x.dtype)

                by_chunk(Z, run)

            last = len(splits) == 3
            after = (
                lambda split: norm(split, x, mlp_norm, normed),
                activate,
                lambda split: norm(split, total, next_norm, result if last else normed),
                project,
            )
            used = jnp.int32(0)
            for number, split in enumerate(splits):
                used = multiply(split, used)
                sync.arrive(2 * number)
                sync.wait(2 * number)
                after[number](split)
                if number + 1 < len(splits):
                    sync.arrive(2 * number + 1)

    return body
