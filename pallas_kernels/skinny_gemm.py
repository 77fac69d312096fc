"""Skinny GEMM on Hopper (Mosaic GPU): few rows, weights streamed once through shared memory.

One CTA computes a tile of columns of W matrices over one run of the depth. A producer warpgroup
copies chunks of weights and rows (TMA) through a pipeline in shared memory. One consumer warpgroup
for each 64 rows multiplies them (wgmma) and passes the accumulators to ``finish``. Bytes moved: the
weights once from device memory, evicted first from the L2 cache; the rows once for each tile of
columns, from the L2 cache; the result of ``finish``.

wgmma takes 64 rows. A pipeline stage holds only the real rows, and the instruction reads beyond
them into the following stages. Rows of a product are independent, so those results are dropped.
"""

# Pallas passes a leading context to inlined functions, which its types do not say.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAbstractUsage=false

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float

from pallas_kernels.gemv_row import DEPTH_UNIT, GROUP, MOST_COLUMNS, GivenRow, Line, RowSource
from pallas_kernels.mosaic_emit import SCALAR, evict_first

_ACC = plgpu.WGMMAAccumulatorRef
ROWS = (1, 8, 16, 32, 64, 128)
"""Rows that the kernel takes."""

_TILE = 64  # rows of an instruction
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # a thread, with two consumers
_SLOTS = 8  # more gain nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut into programs.

    Attributes:
        columns: of a program, of each matrix: 64 or 128.
        chunk: depth of a slot of the ring, a multiple of 64.
        splits: runs of the depth, each of a program of its own.
        ring: slots.
    """

    columns: int
    chunk: int
    splits: int
    ring: int


def ring_slots(
    rows: int, depth: int, *, columns: int, chunk: int, splits: int, shared_bytes: int
) -> int:
    """Slots for a Cut that fit in so many bytes of shared memory, ``columns`` of all matrices."""
    runs = -(-depth // chunk // splits)  # chunks of a program
    if rows == 1:  # the row lies there whole
        beside, of_slot = _line_rows(rows, runs) * chunk * 2, columns * chunk * 2
    else:  # what the instruction on the last slot reads beyond it
        beside, of_slot = max(0, _TILE - rows) * chunk * 2, (columns + rows) * chunk * 2
    return max(2, min(_SLOTS, (shared_bytes - beside) // of_slot, runs))


def _line_rows(rows: int, slots: int) -> int:
    """Of shared memory, for so many slots of rows, or for one row so many chunks deep."""
    return (slots - 1) * max(rows, GROUP) + max(rows, _TILE)


def refusal(rows: int, depth: int, columns: int, dtype: DTypeLike) -> str | None:
    """Why the kernel cannot multiply [rows, depth] with [depth, columns], or None."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"numbers are {jnp.dtype(dtype)}; the kernel takes one 16-bit dtype"
    if rows not in ROWS:
        return f"{rows} rows; the kernel takes {', '.join(map(str, ROWS))}, so pad them"
    unit = DEPTH_UNIT if rows == 1 else 64
    if depth % unit or columns % 64:
        return (
            f"weights of {depth} x {columns}; with {rows} rows the kernel takes multiples of "
            f"{unit} x 64"
        )
    return None


def row_refusal(depth: int, run: int) -> str | None:
    """Why a program cannot hold ``run`` of one row's ``depth`` numbers, or None."""
    if run > MOST_COLUMNS:
        return (
            f"a row of {depth} numbers in runs of {run}; with one row the kernel takes runs of at "
            f"most {MOST_COLUMNS}, so pad it to {ROWS[1]} rows"
        )
    return None


def skinny_gemm(
    name: str,
    h: Float[Array, "T D"] | RowSource,
    w: Float[Array, "D W E"],
    cut: Cut,
    out: jax.ShapeDtypeStruct,
    finish: Callable[..., None],
) -> tuple[Array, ...]:
    """What ``finish`` makes of h @ w[:, i] for all i, and the results of a RowSource.

    Args:
        name: of the kernel, in profiles.
        h, w: bfloat16 or float16, both alike; see ``refusal``. One row may come from what makes it.
        cut: columns divide E.
        out: shape and dtype of the result.
        finish: (reference to the result in GMEM, W sums over the program's run of the depth, each
            float32 [64, columns] in WGMMA layout, number of the run, first row, first column):
            writes the rows there are (``store_rows``).

    Raises:
        ValueError: a shape or dtype the kernel does not take.
    """
    source = h if isinstance(h, RowSource) else GivenRow(h) if h.shape[0] == 1 else None
    (T, D), (_, W, E), dtype = h.shape, w.shape, h.dtype
    if dtype != w.dtype:
        raise ValueError(f"h is {dtype} and w {w.dtype}; the kernel takes one 16-bit dtype")
    runs = -(-D // cut.chunk // cut.splits)
    why = refusal(T, D, E, dtype) or (row_refusal(D, runs * cut.chunk) if T == 1 else None)
    if why is not None:
        raise ValueError(why)
    n, chunk, ring = cut.columns, cut.chunk, cut.ring
    consumers = -(-T // _TILE)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    operands, results = (h,), ()
    if source is not None:
        operands, results = source.operands, source.results
    assert source is None or chunk == 64

    def kernel(*refs, tiles, lines, full, free, scratch=None):
        """GMEM: rows [T, D] or what they are made of, w [D, W, E], out, other results. SMEM: tiles
        [ring, W, chunk, n], lines [slots of T rows, or of groups for one row, chunk], scratch [4].
        Barriers, one a slot: full, free."""
        given, [w, out, *others] = refs[: len(operands)], refs[len(operands) :]
        column = pl.multiple_of(lax.axis_index("column") * n, n)
        part = lax.axis_index("part")
        chunks = jnp.int32(D // chunk)
        start = lax.div(part * chunks, jnp.int32(cut.splits))
        count = lax.div((part + 1) * chunks, jnp.int32(cut.splits)) - start
        wg = lax.axis_index("wg")

        @pl.when(wg == consumers)
        def _producer():
            if consumers > 1:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def load(i, slot):
                depth = pl.ds(pl.multiple_of((start + i) * chunk, chunk), chunk)
                for which in range(W):
                    some = w.at[depth, which, pl.ds(column, n)]
                    plgpu.copy_gmem_to_smem(some, tiles.at[slot, which], full.at[slot])
                    evict_first()
                if source is None:
                    own = pl.ds(pl.multiple_of(slot * T, T), T)
                    plgpu.copy_gmem_to_smem(given[0].at[:, depth], lines.at[own], full.at[slot])

            def refill(i, _):
                slot = lax.rem(i, jnp.int32(ring))
                plgpu.barrier_wait(free.at[slot])
                load(i, slot)

            first = jnp.minimum(count, ring)
            lax.fori_loop(0, first, lambda i, _: load(i, i), None)
            lax.fori_loop(first, count, refill, None)

        @pl.when(wg < consumers)
        def _consumer():
            if consumers > 1:
                plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            first_row = wg * _TILE if consumers > 1 else jnp.int32(0)
            if source is not None:
                run = (start * chunk, count * chunk, runs * chunk, D)
                is_first = (column == 0) & (part == 0)
                source.fill(given, others, Line(lines, swizzled, *run), scratch, is_first)
                plgpu.commit_smem()

            def accumulate(*totals):
                def step(i, _):
                    slot = lax.rem(i, jnp.int32(ring))
                    plgpu.barrier_wait(full.at[slot])
                    if source is None:
                        own = pl.ds(pl.multiple_of(slot * T + first_row, min(T, _TILE)), _TILE)
                    else:
                        own = pl.ds(pl.multiple_of(i * GROUP, GROUP), _TILE)
                    for which, total in enumerate(totals):
                        plgpu.wgmma(total, lines.at[own], tiles.at[slot, which])
                    plgpu.wgmma_wait(W)  # those of the slot before are done
                    last = lax.rem(i + ring - 1, jnp.int32(ring))
                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[last]))

                lax.fori_loop(0, count, step, None)
                plgpu.wgmma_wait(0)
                return tuple(total[...] for total in totals)

            totals = pl.run_scoped(accumulate, *[_ACC((_TILE, n), jnp.float32)] * W)
            finish(out, totals, part, first_row, column)

    kernel.__name__ = name
    scratch = {} if source is None else {"scratch": plgpu.SMEM((4,), jnp.float32)}
    return plgpu.kernel(
        kernel,
        out_type=(out, *results),
        scratch_types=dict(
            tiles=plgpu.SMEM((ring, W, chunk, n), dtype, transforms=swizzled),
            lines=plgpu.SMEM(
                (_line_rows(T, ring if source is None else runs), chunk),
                dtype,
                transforms=swizzled,
            ),
            full=plgpu.Barrier(num_barriers=ring, num_arrivals=W + (source is None)),
            free=plgpu.Barrier(num_barriers=ring, num_arrivals=consumers),
        )
        | scratch,
        grid=(E // n, cut.splits),
        grid_names=("column", "part"),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*operands, w)


def store_rows(ref, value, first_row, column) -> None:
    """``ref[first_row + row, column + c] = value[row, c]`` for the rows there are.

    ref: [T, E] in GMEM; value: [64, n] in WGMMA layout, of ref's dtype; first_row: int32; column:
    int32, even.
    """
    T = ref.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR))
    def store(_, ref_, value_, first_row_, column_):
        index = ir.IndexType.get()
        above, first = (
            arith.index_cast(index, place.registers.flat[0]) for place in (first_row_, column_)
        )
        places = value_.layout.thread_idxs(value_.shape)
        for (row, at), register in zip(places, value_.registers.flat, strict=True):
            [run] = register.type.shape
            size = run * mgpu.utils.bitwidth(register.type.element_type) // 8
            row = arith.addi(above, row)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, mgpu.c(T, index))):
                place = [row, arith.addi(first, at)]
                vector.store(register, ref_, place, alignment=size)

    store(ref, value, first_row, column)
